"""Decomposes a redistribution between two layouts into steps along one mesh axis each.

The steps are planned here once: the cost model prices exactly what the lowered
program runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

from shardwright.ir.layout import (
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
)


class Collective(Enum):
    """What one step does on the devices of its mesh axis; the first three move no data."""

    SLICE = "slice"  # Replicate -> Shard: keep the own tile
    MASK = "mask"  # Replicate -> Partial: the first device keeps it, the others hold zeros
    EMBED = "embed"  # Shard -> Partial: the own tile among zeros
    REDUCE_SCATTER = "reduce_scatter"  # Partial -> Shard
    ALL_TO_ALL = "all_to_all"  # Shard -> another Shard
    ALL_REDUCE = "all_reduce"  # Partial -> Replicate
    ALL_GATHER = "all_gather"  # Shard -> Replicate

    @property
    def moves_data(self) -> bool:
        return self not in (Collective.SLICE, Collective.MASK, Collective.EMBED)


KINDS: dict[tuple[type[Placement], type[Placement]], Collective] = {
    (Replicate, Shard): Collective.SLICE,
    (Partial, Shard): Collective.REDUCE_SCATTER,
    (Shard, Shard): Collective.ALL_TO_ALL,
    (Partial, Replicate): Collective.ALL_REDUCE,
    (Shard, Replicate): Collective.ALL_GATHER,
    (Replicate, Partial): Collective.MASK,
    (Shard, Partial): Collective.EMBED,
}
# Steps that shrink the tile come first, those that grow it last: less to move in between.
ORDER = {kind: position for position, kind in enumerate(KINDS.values())}


@dataclass(frozen=True, slots=True)
class Step:
    """One change of placement along the mesh axis at index `axis`."""

    axis: int
    src: Placement
    dst: Placement

    @property
    def collective(self) -> Collective:
        return KINDS[type(self.src), type(self.dst)]


@cache
def steps_between(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """Steps that turn a tensor laid out as `src` into `dst`; empty when they are equal.

    Where two axes shard the same atom the outer one cuts first, so its
    placement can only change while the inner one does not hold that atom: the
    inner tile is gathered first and cut again afterwards.

    >>> from shardwright.ir.layout import Mesh
    >>> mesh = Mesh.parse("dp=2 tp=4")
    >>> src, dst = Layout.parse("dp:S(0) tp:P", mesh), Layout.parse("dp:S(0) tp:R", mesh)
    >>> [step.collective.value for step in steps_between(src, dst)]
    ['all_reduce']
    """
    if src.mesh != dst.mesh:
        raise ValueError(f"cannot redistribute from mesh {src.mesh} to mesh {dst.mesh}")
    now, want = list(src.placements), list(dst.placements)
    steps: list[Step] = []
    while now != want:
        pending = [axis for axis in range(len(now)) if now[axis] != want[axis]]
        free = [axis for axis in pending if not _blockers(now, want, axis)]
        if free:
            axis = min(free, key=lambda a: (ORDER[KINDS[type(now[a]), type(want[a])]], a))
            target = want[axis]
        else:
            involved = {*pending, *(b for a in pending for b in _blockers(now, want, a))}
            axis = max(a for a in involved if isinstance(now[a], Shard))
            target = REPLICATE
        steps.append(Step(axis, now[axis], target))
        now[axis] = target
    return tuple(steps)


def _blockers(now: list[Placement], want: list[Placement], axis: int) -> list[int]:
    """Axes that must change before `axis` can go from `now` to what it wants."""
    touched = [p for p in (now[axis], want[axis]) if isinstance(p, Shard)]
    inner = [j for j in range(axis + 1, len(now)) if now[j] in touched]
    outer = [
        i
        for i in range(axis)
        if now[i] != want[i] and isinstance(want[axis], Shard) and want[axis] in (now[i], want[i])
    ]
    return inner + outer
