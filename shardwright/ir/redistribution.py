"""Decomposes a redistribution between two layouts into steps along one mesh axis each.

The cost model and the lowered program both use these steps, so what is priced
is what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Generic, TypeVar, final

from shardwright.ir.layout import (
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
)

T = TypeVar("T")


class Collective(Enum):
    """The operation of one step on the devices of its mesh axis; the first three move no data.

    A new kind has its change of placement in `KINDS`, and an entry in each `ByKind`: its
    price (`simulate/costs`), its memory (`simulate/memory`) and how it is run (`runtime/comm`).
    """

    SLICE = "slice"  # Replicate -> Shard: every device keeps its tile
    MASK = "mask"  # Replicate -> Partial: the first device keeps it, the others hold zeros
    EMBED = "embed"  # Shard -> Partial: every device's tile, padded with zeros
    REDUCE_SCATTER = "reduce_scatter"  # Partial -> Shard
    ALL_TO_ALL = "all_to_all"  # Shard -> another Shard
    ALL_REDUCE = "all_reduce"  # Partial -> Replicate
    ALL_GATHER = "all_gather"  # Shard -> Replicate

    @property
    def moves_data(self) -> bool:
        """Whether devices send each other anything."""
        return self not in (Collective.SLICE, Collective.MASK, Collective.EMBED)

    @property
    def change(self) -> tuple[type[Placement], type[Placement]]:
        """The placements before and after."""
        return next(pair for pair, kind in KINDS.items() if kind is self)

    @property
    def gradient(self) -> Collective:
        """The kind that takes the gradient of its result to that of its operand: its transpose.

        The gradient of a value that all devices have is a sum of their terms, and the other way
        round.

        >>> Collective.ALL_GATHER.gradient.value, Collective.ALL_REDUCE.gradient.value
        ('reduce_scatter', 'all_reduce')
        """
        src, dst = (_GRADIENT[placement] for placement in self.change)
        return KINDS[dst, src]


KINDS: dict[tuple[type[Placement], type[Placement]], Collective] = {
    (Replicate, Shard): Collective.SLICE,
    (Partial, Shard): Collective.REDUCE_SCATTER,
    (Shard, Shard): Collective.ALL_TO_ALL,
    (Partial, Replicate): Collective.ALL_REDUCE,
    (Shard, Replicate): Collective.ALL_GATHER,
    (Replicate, Partial): Collective.MASK,
    (Shard, Partial): Collective.EMBED,
}


class Exchange(Enum):
    """Communication that changes no layout: messages between two ranks, and rows to experts.

    As a collective, a new kind has an entry in each `ByKind`: its price, its memory.
    """

    SWAP = "swap"  # parts of a sequence go to the ranks that compute with them (zigzag), and back
    RING = "ring"  # one block of keys and values goes to the next rank (ring attention)
    ROWS = "rows"  # rows go to the ranks that hold their experts, and results back (all_to_all)
    MESSAGE = "message"  # values go from one pipeline stage to the next

    @property
    def gradient(self) -> Exchange:
        """The kind that takes gradients back: the same in the other direction."""
        return self


CommKind = Collective | Exchange


def communication_named(word: str) -> CommKind:
    """The kind of this name in plans; raises `ValueError` if it is not known."""
    if word in {kind.value for kind in (Exchange.SWAP, Exchange.RING)}:
        return Exchange(word)
    return Collective(word)


_GRADIENT: dict[type[Placement], type[Placement]] = {
    Replicate: Partial,
    Partial: Replicate,
    Shard: Shard,
}
MOVING = tuple(kind for kind in Collective if kind.moves_data)
LOCAL = tuple(kind for kind in Collective if not kind.moves_data)
# Steps that shrink the tile come first, those that grow it last: less to move in between.
ORDER = {kind: position for position, kind in enumerate(KINDS.values())}


@final
class ByKind(Generic[T]):
    """A table over kinds of communication: one layer's prices, memory, or functions to run.

    Raises `ValueError` where one of `kinds` is missing or another one is there, and for a kind that
    is looked up and not known: "... is no communication `that`".
    """

    def __init__(
        self,
        that: str,
        entries: Mapping[CommKind, T],
        kinds: Iterable[CommKind] = (*Collective, *Exchange),
    ) -> None:
        if wrong := set(kinds) ^ entries.keys():
            names = ", ".join(sorted(kind.value for kind in wrong))
            raise ValueError(f"of communication {that}, {names} is missing or must not be there")
        self._that, self._entries = that, dict(entries)

    def __getitem__(self, kind: CommKind) -> T:
        if kind not in self._entries:
            raise ValueError(f"{kind} is no communication {self._that}")
        return self._entries[kind]


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """One change of placement along the mesh axis at index `axis`."""

    axis: int
    src: Placement
    dst: Placement

    @property
    def collective(self) -> Collective:
        return KINDS[type(self.src), type(self.dst)]


@cache
def steps_between(src: Layout, dst: Layout) -> tuple[PlacementChange, ...]:
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
    steps: list[PlacementChange] = []
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
        steps.append(PlacementChange(axis, now[axis], target))
        now[axis] = target
    return tuple(steps)


def _blockers(now: list[Placement], want: list[Placement], axis: int) -> list[int]:
    """Axes that must change before `axis` can change to its wanted placement."""
    touched = [p for p in (now[axis], want[axis]) if isinstance(p, Shard)]
    inner = [j for j in range(axis + 1, len(now)) if now[j] in touched]
    outer = [
        i
        for i in range(axis)
        if now[i] != want[i] and isinstance(want[axis], Shard) and want[axis] in (now[i], want[i])
    ]
    return inner + outer
