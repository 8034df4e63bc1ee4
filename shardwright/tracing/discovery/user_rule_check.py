"""Checks a rule that the user stated by running the operator on a whole input and on tiles.

Only a large difference counts, because an operator may compute in a lower precision than its
operands have. Samples whose tiles the operator rejects are skipped: it may accept the tiles of its
original sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from shardwright.ir.graph import Graph, Op
from shardwright.tracing.call import CaptureError
from shardwright.tracing.discovery.experiment import Finding, first_notation, first_running_trial
from shardwright.tracing.discovery.trial import Trial, TrialCall, TrialTiles, gradients_of

_SAMPLES = (
    0,
    1,
    2,
    3,
    4,
    8,
    9,
)  # with floating-point operands between -2 and 2, so that sums lose little precision
_GROSS = 0.05  # of the largest magnitude in the whole and the tiles

Names = tuple[tuple[str, ...], ...]  # per dimension


class NotationLike(Protocol):
    """A rule for operands and results of given shapes: `rules.notation.Notation`."""

    @property
    def operands(self) -> tuple[Names, ...]: ...
    @property
    def results(self) -> tuple[Names, ...]: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def whole(self) -> frozenset[str]: ...
    @property
    def additive(self) -> frozenset[int]: ...


class Parse(Protocol):
    """Parses a rule for shapes of operands and results; raises if it does not fit them."""

    def __call__(
        self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
    ) -> NotationLike: ...


def check_user_rule(op: Op, graph: Graph, text: str, parse: Parse) -> None:
    """Raise `CaptureError` if the rule `text`, which `parse` reads, is false for the call `op`.

    A rule is not checked if the call runs at no sizes that are tried, or if it does not fit them.
    """
    first_notation(op, graph, partial(_checked, text, parse))


def _checked(text: str, parse: Parse, call: TrialCall, differentiates: bool) -> Finding:
    """A search for `first_notation`: returns the error of a false rule, and otherwise no splits."""
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
        ):  # also where the caller disabled gradients
            trial = first_running_trial(call, differentiates)
            if trial is None:
                return None
            whole = trial.whole(0)[1] or []
            shapes = [trial.shapes[name] for name in call.op.operands]
            try:
                user_rule = parse(shapes, [tuple(result.shape) for result in whole])
            except Exception:  # e.g. the rule states sizes, which are replaced here
                return None
            for name in user_rule.sizes:
                if name not in user_rule.whole:
                    _check(trial, text, user_rule, name)
            return trial, []
    except CaptureError as e:
        return e


def _check(trial: Trial, text: str, user_rule: NotationLike, name: str) -> None:
    """Raise `CaptureError` if tiles along the index `name` do not give the whole as the rule says.

    An index that is only part of a dimension, or two dimensions of an operand, is not checked.
    """
    op = trial.op
    cut: dict[str, int] = {}
    zeros = []
    for i, (operand, dims) in enumerate(zip(op.operands, user_rule.operands, strict=True)):
        at = _place(dims, name)
        if at is None and i in user_rule.additive:
            zeros.append(operand)
        if at == -1 or (at is not None and cut.setdefault(operand, at) != at):
            return  # part of a dimension, or two dimensions of one operand
    positions = [_place(dims, name) for dims in user_rule.results]
    if not cut or -1 in positions:
        return
    summed = [position is None for position in positions]
    found = [None if position is None else (position, 1) for position in positions]
    for number in _SAMPLES:
        tiles = trial.tiles(cut, number, zeros if any(summed) else ())
        if tiles is None:
            continue
        wrong = "result" if _results_differ(tiles, positions) else ""
        if not wrong and not zeros and trial.differentiates:
            pairs = gradients_of(tiles, cut, found)
            wrong = "gradient" if any(_exceeds_rounding(a, b) for a, b in pairs) else ""
        if wrong:
            raise CaptureError(
                f"{op.source}: your rule for {op.target} says {text!r}, but splitting {name} gives"
                f" another {wrong} than the whole (tried with {tiles.size} in tiles of"
                f" {tiles.lengths[0]} and {tiles.lengths[1]}); write {name}! for an index that each"
                " device needs whole"
            )


def _place(dims: Names, name: str) -> int | None:
    """The dimension that is the index `name`; -1 if the index is part of one, None if of none."""
    for at, names in enumerate(dims):
        if name in names:
            return at if names == (name,) else -1
    return None


def _results_differ(tiles: TrialTiles, positions: Sequence[int | None]) -> bool:
    for whole, a, b, position in zip(tiles.whole, *tiles.results, positions, strict=True):
        if position is None and a.shape != b.shape:
            return True
        if position is None and a.dtype == torch.bool:
            continue  # no sum of parts is defined
        try:
            made = a + b if position is None else torch.cat([a, b], position)
        except RuntimeError:  # their shapes do not fit
            return True
        if _exceeds_rounding(made, whole, a, b):
            return True
    return False


def _exceeds_rounding(made: torch.Tensor, whole: torch.Tensor, *parts: torch.Tensor) -> bool:
    """Whether the difference is larger than rounding explains.

    Floating-point numbers may differ by `_GROSS` of the largest finite magnitude in `whole` and
    `parts`, and must be finite at the same indices; other numbers must be equal.
    """
    if made.shape != whole.shape:
        return True
    if not (whole.is_floating_point() or whole.is_complex()):
        return not torch.equal(made, whole)
    same_nan = made.isfinite() == whole.isfinite()
    if not bool(same_nan.all()):
        return True
    finite = whole.isfinite()
    largest = max(
        (p.detach().nan_to_num().abs().max().item() for p in (whole, *parts) if p.numel()),
        default=0.0,
    )
    difference = (made - whole).detach()[finite].abs()
    return bool((difference > _GROSS * largest + 1e-6).any())
