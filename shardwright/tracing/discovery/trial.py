"""One call of an operator in an experiment: its samples, its tiles and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from shardwright.ir.graph import FUNCTION, Arg, Op, Tensor
from shardwright.tracing.call import CaptureError
from shardwright.tracing.discovery.recombine import equal, gradients, recombine_tiles, weights_of
from shardwright.tracing.discovery.samples import HARSH, ORDINARY, sample
from shardwright.tracing.export.operators import call_op

_SMALLEST_NAMED = 5  # an integer argument from here on that equals a size is replaced with it
_MOST_CANDIDATES = 256  # sets of operand dimensions, per size
_FEWEST = 5  # samples that an operator must accept
_SCALES = (1.0, -1e-5, 1e-2, -1e5)  # of the gradients of results
_CPU = torch.device("cpu")

OperandDim = tuple[str, int]  # an operand and one of its dimensions


@dataclass(frozen=True)
class TrialCall:
    """An operator call to run at sizes replaced as `sizes` says, with floats in `float_dtype`.

    `described` has its operands by name, `dims` the number of dimensions of each result.
    """

    op: Op
    described: Mapping[str, Tensor]
    sizes: Mapping[int, int]
    float_dtype: torch.dtype
    dims: Sequence[int]
    least: int = 0  # sizes up to it stay as they are


@dataclass(frozen=True)
class Cut:
    """A factor: the operand dimensions that are split together, and how each result recombines.

    `results[i]` is (dimension, repeats) where the tiles' results are concatenated along a dimension
    of `repeats` times the length that is split, and None where they are summed.
    """

    operand_dims: tuple[OperandDim, ...]
    results: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class TrialTiles:
    """A sample of a call and two tiles of it: operands and results of each.

    The dimension that is split has length `size` in the sample, and the two `lengths` in the tiles.
    """

    drawn: Mapping[str, torch.Tensor]
    whole: list[torch.Tensor]
    operands: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    results: tuple[list[torch.Tensor], list[torch.Tensor]]
    size: int
    lengths: tuple[int, int]


class Trial:
    """One call in one domain.

    Without `differentiates`, i.e. where autograd does not work, all calls are made but no split is
    accepted, because its gradients are not compared.
    """

    def __init__(self, call: TrialCall, domain: str, differentiates: bool) -> None:
        op, sizes = call.op, call.sizes
        self.op = replace(
            op,
            args=tuple(_resized(a, sizes) for a in op.args),
            kwargs=tuple((key, _resized(value, sizes)) for key, value in op.kwargs),
        )
        self.call, self.domain, self.differentiates = call, domain, differentiates
        self.shapes = {
            name: tuple(sizes.get(size, size) for size in tensor.shape)
            for name, tensor in call.described.items()
        }
        self._known: dict[int, tuple[dict[str, torch.Tensor], list[torch.Tensor] | None]] = {}

    def whole(self, number: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor] | None]:
        """Operands and results of sample `number`; None if the operator rejects the operands."""
        if number not in self._known:
            kind, call = self.op.kind, self.call
            drawn = sample(kind, call.described, self.shapes, call.float_dtype, self.domain, number)
            self._known[number] = drawn, self._call(drawn)
        return self._known[number]

    def runs(self) -> bool:
        """Whether an experiment with this call is meaningful.

        The operator must accept enough samples, return results of the expected numbers of
        dimensions, leave its operands unchanged, and return equal results for equal operands.
        Raises `CaptureError` for a user's operator that fails only the last.
        """
        drawn, first = self.whole(0)
        before = {name: value.detach().clone() for name, value in drawn.items()}
        again = self._call(drawn)
        if first is None or again is None or [r.dim() for r in first] != list(self.call.dims):
            return False
        if not self._takes_enough():
            return False
        if any(not equal(drawn[name].detach(), value) for name, value in before.items()):
            return False  # it writes to its operands, which no rule expresses
        if all(equal(a, b) for a, b in zip(first, again, strict=True)):
            return True
        if self.op.target.startswith("aten."):
            return False
        raise CaptureError(
            f"{self.op.source}: {self.op.target} gives another result when it is called again;"
            " draw random numbers outside of it, with torch.rand"
        )

    def _takes_enough(self) -> bool:
        """Whether at least `_FEWEST` ordinary samples run, with varying values of each operand.

        For example, `masked_scatter` rejects a mask that is true where its source is too small, and
        computes something else where the mask is false.
        """
        known = [self.whole(number) for number in range(len(ORDINARY))]
        taken = [drawn for drawn, results in known if results is not None]
        if len(taken) < _FEWEST:
            return False
        for name in self.shapes:
            values = torch.cat([drawn[name].detach().flatten() for drawn in taken])
            if values.numel() and bool((values == values[0]).all()):
                return False
        return True

    def cuts(self) -> list[Cut]:
        """The splits that recombine, each dimension in one split at most."""
        splits: list[Cut] = []
        taken: set[OperandDim] = set()
        for operand_dims in self._candidates():
            if taken.intersection(operand_dims):
                continue
            split = self.recombines(operand_dims)
            if split is None:
                continue
            outputs = {
                (f"result {i}", at[0]) for i, at in enumerate(split.results) if at is not None
            }
            if not taken.intersection(outputs):
                taken.update(operand_dims, outputs)
                splits.append(split)
        return splits

    def _candidates(self) -> Iterator[tuple[OperandDim, ...]]:
        """Sets of operand dimensions of equal length, at most one per operand, small sets first."""
        for size in sorted({n for shape in self.shapes.values() for n in shape if n > 1}):
            options: list[list[OperandDim | None]] = [
                [None, *((name, d) for d, n in enumerate(shape) if n == size)]
                for name, shape in self.shapes.items()
            ]
            found = [
                tuple(p for p in pick if p is not None)
                for pick in _some(product(*options), _MOST_CANDIDATES)
            ]
            yield from sorted((operand_dims for operand_dims in found if operand_dims), key=len)

    def recombines(self, operand_dims: tuple[OperandDim, ...]) -> Cut | None:
        """The split along `operand_dims` if all accepted samples recombine alike, else None."""
        verdict, decided = None, False
        for number in range(len(ORDINARY)):
            whole = self.whole(number)[1]
            if whole is None:
                continue
            found = self._compare(dict(operand_dims), number)
            if found is None or found != (verdict or found):
                return None
            verdict = found
            # A sum of zeros proves nothing: it is zero for any operator.
            summed = [bool(w.any()) for w, at in zip(whole, found, strict=True) if at is None]
            decided = decided or all(summed)
        if verdict is None or not decided or not self.differentiates:
            return None
        return Cut(operand_dims, verdict)

    def passes_harsh_samples(self, cut: Cut) -> bool:
        """Whether the split also recombines for the harsh samples that the operator accepts."""
        for number in range(len(ORDINARY), len(ORDINARY) + len(HARSH)):
            if self.whole(number)[1] is not None:
                found = self._compare(dict(cut.operand_dims), number)
                if found != cut.results:
                    return False
        return True

    def tiles(
        self, cut: Mapping[str, int], number: int, zeros: Sequence[str] = ()
    ) -> TrialTiles | None:
        """Sample `number` and its two tiles along the dimensions `cut`, by operand.

        Returns None where the operator rejects the sample or a tile, or where a tile would be
        empty. Operands in `zeros`, which are not split, are zero in the second tile.
        """
        drawn, whole = self.whole(number)
        size = next(drawn[name].shape[dim] for name, dim in cut.items())
        # Three positions of the cut; the last leaves a tile of length one, which may broadcast.
        length = ((2 * size + 2) // 3, (size + 1) // 2, size - 1)[number % 3]
        if whole is None or length == size:
            return None
        lengths = (length, size - length)
        tiles: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        for name, value in drawn.items():
            parts = value.split(lengths, cut[name]) if name in cut else [value] * 2
            for i, (tile, part) in enumerate(zip(tiles, parts, strict=True)):
                mine = part.detach().clone()
                mine = mine.zero_() if i == 1 and name in zeros else mine
                tile[name] = mine.requires_grad_(value.requires_grad)
        one, other = (self._call(tile) for tile in tiles)
        if one is None or other is None:
            return None
        return TrialTiles(drawn, whole, tiles, (one, other), size, lengths)

    def _compare(
        self, cut: Mapping[str, int], number: int
    ) -> tuple[tuple[int, int] | None, ...] | None:
        """The recombination of each result, as in `Cut`; None where tiles do not give the whole."""
        tiles = self.tiles(cut, number)
        if tiles is None:
            return None
        found: list[tuple[int, int] | None] = []
        for result, a, b in zip(tiles.whole, *tiles.results, strict=True):
            verdict = recombine_tiles(result, a, b, tiles.size, tiles.lengths[0])
            if verdict == "neither":
                return None
            found.append(None if isinstance(verdict, str) else verdict)
        if self.differentiates and not self._same_gradients(tiles, cut, found):
            return None
        return tuple(found)

    def _same_gradients(
        self, tiles: TrialTiles, cut: Mapping[str, int], found: Sequence[tuple[int, int] | None]
    ) -> bool:
        """Whether the gradients of the tiles give those of the whole.

        Backward passes of torch's operators are linear in the incoming gradient, so one scale of it
        suffices. A user's backward pass may clip or round it, so several scales are compared, each
        after new forward calls, because it may run only once. If it fails, gradients differ.
        """
        if self.op.target != FUNCTION:
            return all(equal(mine, other) for mine, other in gradients_of(tiles, cut, found))
        wanted = any(r.requires_grad for r in tiles.whole) and any(
            value.requires_grad for value in tiles.drawn.values()
        )
        for scale in _SCALES:
            whole, one, other = map(self._call, (tiles.drawn, *tiles.operands))
            if whole is None or one is None or other is None:
                return False
            again = replace(tiles, whole=whole, results=(one, other))
            pairs = list(gradients_of(again, cut, found, scale))
            if (wanted and not pairs) or not all(equal(mine, other) for mine, other in pairs):
                return False
        return True

    def _call(self, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        try:
            results = call_op(self.op, values, _CPU)
        except Exception:  # rejects these sizes, values or this precision
            return None
        return results if all(isinstance(r, torch.Tensor) for r in results) else None

    def text(self, splits: Sequence[Cut]) -> str:
        """The index notation of the splits; `!` marks indices that cannot be split."""
        words = {
            name: [f"w{o}d{d}!" for d in range(len(shape))]
            for o, (name, shape) in enumerate(self.shapes.items())
        }
        whole = self.whole(0)[1] or []
        results = [[f"r{i}d{d}!" for d in range(one.dim())] for i, one in enumerate(whole)]
        for number, split in enumerate(splits):
            for name, dim in split.operand_dims:
                words[name][dim] = f"f{number}"
            for i, at in enumerate(split.results):
                if at is not None:
                    dim, repeats = at
                    word = f"f{number}"
                    results[i][dim] = word if repeats == 1 else f"({word} q{number}_{i}!)"
        left = ", ".join(" ".join(words[name]) for name in self.op.operands)
        return f"{left} -> {', '.join(' '.join(one) for one in results)}"


def gradients_of(
    tiles: TrialTiles,
    cut: Mapping[str, int],
    found: Sequence[tuple[int, int] | None],
    scale: float = 1.0,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each operand that has one, the gradient that the tiles give and that of the whole.

    `found` says how each result recombines, as in `Cut`. The incoming gradients are `weights_of`
    the results times `scale`. Where operands have a gradient in the whole but not in the tiles, or
    the reverse, the only pair has different shapes, so that it never compares equal.
    """
    weights = [scale * weight for weight in weights_of(tiles.whole)]
    halves = [
        [w, w] if at is None else list(w.split([n * at[1] for n in tiles.lengths], at[0]))
        for w, at in zip(weights, found, strict=True)
    ]
    expected = gradients(tiles.whole, weights, tiles.drawn)
    a, b = (
        gradients(results, [half[i] for half in halves], operands)
        for i, (operands, results) in enumerate(zip(tiles.operands, tiles.results, strict=True))
    )
    if a.keys() != expected.keys() or b.keys() != expected.keys():
        yield torch.zeros(1), torch.zeros(2)
        return
    for name, gradient in expected.items():
        one, other = a[name], b[name]
        yield (torch.cat([one, other], cut[name]) if name in cut else one + other), gradient


def _resized(arg: Arg, sizes: Mapping[int, int]) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_resized(a, sizes) for a in arg)
    if isinstance(arg, int) and not isinstance(arg, bool) and arg >= _SMALLEST_NAMED:
        return sizes.get(arg, arg)
    return arg


def _some(
    picks: Iterator[tuple[OperandDim | None, ...]], most: int
) -> Iterator[tuple[OperandDim | None, ...]]:
    for pick, _ in zip(picks, range(most), strict=False):
        yield pick
