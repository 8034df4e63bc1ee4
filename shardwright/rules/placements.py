"""Layouts of an operator's operands and results under one tiling, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shardwright.ir.layout import Layout, Mesh, fits
from shardwright.rules.rule import JointSplit, Rule, Tiling, word_of


@dataclass(frozen=True, slots=True)
class OpLayouts:
    """Layouts of all values that an operator reads and writes under one `tiling`.

    * `operand_grads[i]`: the layout in which the backward pass produces the gradient of operand i;
      it needs the gradient of result i in the layout `results[i].dual()`;
    * `internal_reductions`: tensors inside of the operator; Partial ones are reduced while it runs.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operand_grads: tuple[Layout, ...]
    internal_reductions: tuple[Layout, ...] = ()
    tiling: Tiling = ()


def layouts_under(rule: Rule, tiling: Tiling, mesh: Mesh) -> OpLayouts:
    """The layouts of an operator under `tiling`, which has one choice per axis of `mesh`."""
    per_axis = [rule.axis_placements(choice) for choice in tiling]

    def gather(count: int, field: str) -> tuple[Layout, ...]:
        return tuple(
            Layout(mesh, tuple(getattr(axis, field)[i] for axis in per_axis)) for i in range(count)
        )

    return OpLayouts(
        gather(len(rule.operands), "operands"),
        gather(len(rule.results), "results"),
        gather(len(rule.operands), "operand_grads"),
        gather(len(rule.internal_reductions), "internal_reductions"),
        tiling,
    )


def feasible(rule: Rule, op_layouts: OpLayouts) -> bool:
    """Whether no device would hold an empty tile of any operand or result."""
    pairs = (*zip(rule.operands, op_layouts.operands, strict=True),)
    pairs += (*zip(rule.results, op_layouts.results, strict=True),)
    return all(fits(rule.atoms(dims), layout) for dims, layout in pairs)


def tilings(rule: Rule, mesh: Mesh) -> Iterator[tuple[Tiling, OpLayouts]]:
    """Every feasible tiling of an operator on `mesh`, all-replicated first."""
    choices = rule.choices()
    for tiling in product(*(choices if size > 1 else choices[:1] for size in mesh.shape)):
        op_layouts = layouts_under(rule, tiling, mesh)
        shared = sum(isinstance(choice, JointSplit) for choice in tiling)
        if shared <= 1 and feasible(rule, op_layouts):
            yield tiling, op_layouts


def tiling_text(tiling: Tiling) -> tuple[str, ...]:
    """One word per mesh axis (`word_of`).

    >>> tiling_text((None, None))
    ('-', '-')
    """
    return tuple(map(word_of, tiling))


def parse_tiling(rule: Rule, words: tuple[str, ...]) -> Tiling:
    """The inverse of `tiling_text`; raises `ValueError` for a choice that the rule lacks."""
    known = rule.by_word
    for word in words:
        if word not in known:
            raise ValueError(
                f"{word!r} is no tiling of {rule}; it may be one of {', '.join(known)}"
            )
    return tuple(known[word] for word in words)
