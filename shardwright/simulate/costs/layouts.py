"""Layouts and local sizes of one operator under a tiling on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.ir.layout import (
    Atoms,
    Bytes,
    Layout,
    Mesh,
    Placement,
    chunk,
    largest_atoms,
    num_elements,
)
from shardwright.rules.rule import SPREAD, AxisPlacements, Choice, Route, Rule, Tiling


@dataclass(frozen=True, slots=True)
class TilingLayouts:
    """Layouts under one tiling: the `AxisPlacements` of every axis, collected."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operand_grads: tuple[Layout, ...]
    result_grads: tuple[Layout, ...]


def operand_layout(rule: Rule, tiling: Tiling, i: int, mesh: Mesh) -> Layout:
    """How the operator wants operand `i`."""
    return Layout(mesh, tuple(rule.axis_placements(choice).operands[i] for choice in tiling))


def result_layout(rule: Rule, tiling: Tiling, i: int, mesh: Mesh) -> Layout:
    """How result `i` comes out."""
    return Layout(mesh, tuple(rule.axis_placements(choice).results[i] for choice in tiling))


def operand_grad_layout(rule: Rule, tiling: Tiling, i: int, mesh: Mesh) -> Layout:
    """How the gradient of operand `i` comes out of the operator's backward."""
    return Layout(mesh, tuple(rule.axis_placements(choice).operand_grads[i] for choice in tiling))


def tiling_layouts(rule: Rule, tilings: Sequence[Tiling], mesh: Mesh) -> list[TilingLayouts]:
    """All layouts of every tiling; equal layouts are the same object, so comparing them is fast."""
    axis_placements: dict[Choice, AxisPlacements] = {}
    known: dict[tuple[Placement, ...], Layout] = {}

    def layout(placements: tuple[Placement, ...]) -> Layout:
        found = known.get(placements)
        if found is None:
            found = known[placements] = Layout(mesh, placements)
        return found

    def collect(per_axis: Sequence[tuple[Placement, ...]]) -> tuple[Layout, ...]:
        return tuple(layout(placements) for placements in zip(*per_axis, strict=True))

    def whole(count: int) -> tuple[Layout, ...]:
        return (layout(()),) * count

    found = []
    for tiling in tilings:
        for choice in tiling:
            if choice not in axis_placements:
                axis_placements[choice] = rule.axis_placements(choice)
        axes = [axis_placements[choice] for choice in tiling]
        if not axes:  # a mesh without axes: one device
            operands, results = whole(len(rule.operands)), whole(len(rule.results))
            found.append(TilingLayouts(operands, results, operands, results))
            continue
        found.append(
            TilingLayouts(
                operands=collect([axis.operands for axis in axes]),
                results=collect([axis.results for axis in axes]),
                operand_grads=collect([axis.operand_grads for axis in axes]),
                result_grads=collect([axis.result_grads for axis in axes]),
            )
        )
    return found


def local_sizes(rule: Rule, tiling: Tiling, mesh: Mesh) -> tuple[int, ...]:
    """Size of every factor on the device with the largest tiles: `ceil` at every cut."""
    return _cut(rule, tiling, mesh, lambda size, parts: -(-size // parts))


def feasible(rule: Rule, tiling: Tiling, mesh: Mesh) -> bool:
    """Whether no device would hold an empty tile: every operand and result `fits`.

    Atoms of operands and results are factors, so looking at the last tile of
    every factor is enough.
    """
    last = _cut(rule, tiling, mesh, lambda size, parts: chunk(size, parts, parts - 1)[1])
    return all(
        length > 0 or factor.size == 0 for length, factor in zip(last, rule.factors, strict=True)
    )


def _cut(rule: Rule, tiling: Tiling, mesh: Mesh, cut: Callable[[int, int], int]) -> tuple[int, ...]:
    """Factor sizes after the cuts of all axes, outer axes first."""
    sizes = {factor.name: factor.size for factor in rule.factors}
    for choice, parts in zip(tiling, mesh.shape, strict=True):
        for factor in rule.cuts(choice):
            sizes[factor] = cut(sizes[factor], parts)
        if isinstance(choice, Route):
            sizes[SPREAD] *= parts
    return tuple(sizes[factor.name] for factor in rule.factors)


def local_bytes(atoms: Atoms, item_bytes: int, layout: Layout) -> Bytes:
    """Bytes of the largest tile of a tensor of `atoms` under `layout`."""
    return Bytes(num_elements(largest_atoms(atoms, layout)) * item_bytes)
