"""Computes sizes of the largest local tile, of an operator's factors and of a tensor."""

from __future__ import annotations

from shardwright.ir.layout import Atoms, Bytes, Layout, Mesh, largest_atoms, num_elements
from shardwright.rules.rule import SPREAD, Route, Rule, Tiling


def local_sizes(rule: Rule, tiling: Tiling, mesh: Mesh) -> tuple[int, ...]:
    """The size of every factor of `rule` on the device with the largest tiles.

    Mesh axes split in their order, and each split rounds up.
    """
    sizes = {factor.name: factor.size for factor in rule.factors}
    for choice, parts in zip(tiling, mesh.shape, strict=True):
        for factor in rule.cuts(choice):
            sizes[factor] = -(-sizes[factor] // parts)
        if isinstance(choice, Route):
            sizes[SPREAD] *= parts
    return tuple(sizes[factor.name] for factor in rule.factors)


def local_bytes(atoms: Atoms, item_bytes: int, layout: Layout) -> Bytes:
    """Bytes of the largest tile of a tensor of `atoms` under `layout`."""
    return Bytes(num_elements(largest_atoms(atoms, layout)) * item_bytes)
