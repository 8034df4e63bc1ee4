"""Choices of operators, and layouts of parameters, that split given atoms of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from shardwright.ir.layout import Atoms, Layout, Placement, Shard, is_natural, shape_of
from shardwright.rules.rule import FactorKind, Rule, Split

UNSPLIT = 0  # the index of the choice without a split


def split_choice(rule: Rule, atoms: frozenset[int]) -> int:
    """The index of the first split along one of these atoms; `UNSPLIT` where there is none."""
    for number, choice in enumerate(rule.choices()):
        if isinstance(choice, Split) and rule.factor[choice.factor].atom in atoms:
            assert rule.factor[choice.factor].kind is FactorKind.PARALLEL
            return number
    return UNSPLIT


def most_split(choices: Sequence[tuple[int, ...]], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted` without as few innermost splits as needed to be one of `choices`."""
    for keep in range(len(wanted), -1, -1):
        tried = (*wanted[:keep], *(UNSPLIT,) * (len(wanted) - keep))
        if tried in choices:
            return tried
    raise AssertionError("the replicated tiling is always feasible")


def first_shard(dims: tuple[tuple[int, ...], ...], wanted: frozenset[int]) -> Shard | None:
    """The shard of the first of a tensor's atoms that is in `wanted`; None if none is."""
    for d, ids in enumerate(dims):
        for a, atom in enumerate(ids):
            if atom in wanted:
                return Shard(d, a)
    return None


def with_other_dimensions(shard: Shard, atoms: Atoms) -> list[Shard]:
    """`shard`, and then shards of the other dimensions, the largest first.

    A fused projection that is computed split by heads is stored split along one of the others.
    """
    sizes = shape_of(atoms)
    largest = sorted(range(len(sizes)), key=lambda d: (-sizes[d], d))
    return [shard, *(Shard(d) for d in largest if d != shard.dim)]


def first_natural(
    atoms: Atoms, layout: Layout, axis: int, shards: Iterable[Shard]
) -> tuple[Layout, Shard | None]:
    """`layout` with the first of `shards` on one axis that keeps it natural, and that shard."""
    for shard in shards:
        placements: list[Placement] = list(layout.placements)
        placements[axis] = shard
        tried = Layout(layout.mesh, tuple(placements))
        if is_natural(atoms, tried):
            return tried, shard
    return layout, None


def sharded_over(atoms: Atoms, layout: Layout, axes: Iterable[int], split: Set[int]) -> Layout:
    """`layout`, sharded along each of `axes` by the largest atom that allows it.

    Dimensions in `split` come last: a tile that other axes split too would be gathered and split
    again. Each axis takes another dimension if it can: tiles of one dimension that two axes share
    are gathered along the inner axis first, and the outer one, whose links are slower, would carry
    what all devices along the inner one need.
    """
    taken: set[int] = set()
    for axis in axes:
        order = sorted(
            (dim in split, dim in taken, -size, dim, atom)
            for dim, sizes in enumerate(atoms)
            for atom, size in enumerate(sizes)
        )
        shards = [Shard(dim, atom) for *_, dim, atom in order]
        layout, shard = first_natural(atoms, layout, axis, shards)
        taken |= {shard.dim} if shard is not None else set()
    return layout
