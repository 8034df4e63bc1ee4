"""Layouts of an operator's operands and results under one tiling, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shardwright.ir.layout import Layout, Mesh, fits
from shardwright.rules.rule import Rule, Tiling, Together, word_of


@dataclass(frozen=True, slots=True)
class Placing:
    """How everything an operator touches lies on the mesh.

    `operand_grads[i]` is how the gradient of operand i comes out of its
    backward; the gradient of result i is wanted as `results[i].dual()`. Tensors
    inside of it that are Partial in `agreed` are reduced while it runs. `tiling` is what they
    follow from.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operand_grads: tuple[Layout, ...]
    agreed: tuple[Layout, ...] = ()
    tiling: Tiling = ()


def place(rule: Rule, tiling: Tiling, mesh: Mesh) -> Placing:
    """Layouts under `tiling`, which has one choice per axis of `mesh`."""
    placed = [rule.placed(choice) for choice in tiling]

    def gather(count: int, field: str) -> tuple[Layout, ...]:
        return tuple(
            Layout(mesh, tuple(getattr(axis, field)[i] for axis in placed)) for i in range(count)
        )

    return Placing(
        gather(len(rule.operands), "operands"),
        gather(len(rule.results), "results"),
        gather(len(rule.operands), "operand_grads"),
        gather(len(rule.agreed), "agreed"),
        tiling,
    )


def feasible(rule: Rule, placing: Placing) -> bool:
    """Whether no device would hold an empty tile of any operand or result."""
    pairs = (*zip(rule.operands, placing.operands, strict=True),)
    pairs += (*zip(rule.results, placing.results, strict=True),)
    return all(fits(rule.atoms(dims), layout) for dims, layout in pairs)


def tilings(rule: Rule, mesh: Mesh) -> Iterator[tuple[Tiling, Placing]]:
    """Every feasible tiling of an operator on `mesh`, all-replicated first."""
    choices = rule.choices()
    for tiling in product(*(choices if size > 1 else choices[:1] for size in mesh.shape)):
        placing = place(rule, tiling, mesh)
        shared = sum(isinstance(choice, Together) for choice in tiling)
        if shared <= 1 and feasible(rule, placing):
            yield tiling, placing


def tiling_text(tiling: Tiling) -> tuple[str, ...]:
    """One word per axis, as `word_of` says.

    >>> tiling_text((None, None))
    ('-', '-')
    """
    return tuple(map(word_of, tiling))


def parse_tiling(rule: Rule, words: tuple[str, ...]) -> Tiling:
    """The tiling that `tiling_text` wrote; raises `ValueError` for what this operator cannot do."""
    known = rule.by_word
    for word in words:
        if word not in known:
            raise ValueError(
                f"{word!r} is no tiling of {rule}; it may be one of {', '.join(known)}"
            )
    return tuple(known[word] for word in words)
