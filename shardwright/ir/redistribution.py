"""Decomposes a redistribution between two layouts into steps along one mesh axis each.

The cost model and the lowered program both use these steps, so what is priced
is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import ClassVar, Generic, Literal, NamedTuple, TypeVar, final

from shardwright.ir.layout import (
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
)

T = TypeVar("T")


class CrossingParts(NamedTuple):
    """Parts of a tensor that cross a cut, of its size before, after, and of the smaller one."""

    before: float = 0.0
    after: float = 0.0
    smaller: float = 0.0


@final
@dataclass(frozen=True, eq=False, slots=True)
class Collective:
    """A kind of step: the operation on the devices of a mesh axis that changes a placement.

    A new kind is `known` from the file that makes it, and that file gives its entry to each
    `ByKind`: its price (`simulate/costs`) and its memory (`simulate/memory`). A second file says
    how it is run (`runtime/comm` and `runtime/executor`), as only `runtime` knows torch. No
    redistribution takes a kind by itself unless it is in `KINDS`.

    Attributes:
        value: its name in plans and programs.
        change: the placements before and after.
        crossing: the parts of a tensor that cross a cut into so many parts, over all devices.
        moves_data: whether devices send each other anything.
        tiled: the dimension of a `Move` along which each device has a tile on one side of the
            step and the whole on the other: `"src"` or `"dst"`; empty if there is none.
        overwrites: whether it may leave its result in the memory of its operand.
    """

    value: str
    change: tuple[type[Placement], type[Placement]]
    crossing: Callable[[int], CrossingParts]
    moves_data: bool = True
    tiled: Literal["src", "dst", ""] = ""
    overwrites: bool = False

    SLICE: ClassVar[Collective]  # every device keeps its tile
    MASK: ClassVar[Collective]  # the first device keeps it, the others hold zeros
    EMBED: ClassVar[Collective]  # every device's tile, padded with zeros
    REDUCE_SCATTER: ClassVar[Collective]
    ALL_TO_ALL: ClassVar[Collective]
    SWAP: ClassVar[Collective]  # halves of tiles go to the devices that have them in zigzag order
    SWAP_BACK: ClassVar[Collective]  # and return
    ALL_REDUCE: ClassVar[Collective]
    ALL_GATHER: ClassVar[Collective]

    @property
    def gradient(self) -> Collective:
        """The kind that takes the gradient of its result to that of its operand: its transpose.

        The gradient of a value that all devices have is a sum of their terms, and the other way
        round.

        >>> Collective.ALL_GATHER.gradient.value, Collective.ALL_REDUCE.gradient.value
        ('reduce_scatter', 'all_reduce')
        """
        if self in SWAPS:
            return SWAPS[1 - SWAPS.index(self)]
        src, dst = (_GRADIENT[placement] for placement in self.change)
        return KINDS[dst, src]

    def __repr__(self) -> str:
        return f"Collective({self.value!r})"

    def __str__(self) -> str:
        return self.value

    def __reduce__(self) -> tuple[Callable[[str], Collective], tuple[str]]:
        return collective_named, (self.value,)  # kinds are compared by identity


_KNOWN: dict[str, Collective] = {}


def known(kind: Collective) -> Collective:
    """Makes `kind` one that plans and programs may name; raises `ValueError` for a name twice."""
    if kind.value in _KNOWN:
        raise ValueError(f"there is a collective {kind.value!r} already")
    _KNOWN[kind.value] = kind
    return kind


def collective_named(word: str) -> Collective:
    """The collective of this name; raises `ValueError` if it is not known."""
    if word not in _KNOWN:
        raise ValueError(f"{word!r} is no collective; known are {', '.join(_KNOWN)}")
    return _KNOWN[word]


def _nothing(_parts: int) -> CrossingParts:
    return CrossingParts()


Collective.SLICE = known(Collective("slice", (Replicate, Shard), _nothing, moves_data=False))
Collective.MASK = known(Collective("mask", (Replicate, Partial), _nothing, moves_data=False))
Collective.EMBED = known(Collective("embed", (Shard, Partial), _nothing, moves_data=False))
Collective.REDUCE_SCATTER = known(
    Collective(
        "reduce_scatter",
        (Partial, Shard),
        lambda parts: CrossingParts(before=parts - 1),
        tiled="dst",
    )
)
Collective.ALL_TO_ALL = known(
    Collective(
        "all_to_all", (Shard, Shard), lambda parts: CrossingParts(smaller=(parts - 1) / parts)
    )
)
Collective.SWAP, Collective.SWAP_BACK = SWAPS = tuple(
    known(
        Collective(value, (Shard, Shard), lambda parts: CrossingParts(smaller=(parts - 1) / parts))
    )
    for value in ("swap", "swap_back")
)
Collective.ALL_REDUCE = known(
    Collective(
        "all_reduce",
        (Partial, Replicate),
        lambda parts: CrossingParts(before=parts - 1, after=parts - 1),
        overwrites=True,
    )
)
Collective.ALL_GATHER = known(
    Collective(
        "all_gather",
        (Shard, Replicate),
        lambda parts: CrossingParts(after=parts - 1),
        tiled="src",
    )
)
# The kinds that redistributions take. Steps that shrink the tile come first, those that grow it
# last: less to move in between.
COLLECTIVES = (
    Collective.SLICE,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    *SWAPS,
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.MASK,
    Collective.EMBED,
)
KINDS = {kind.change: kind for kind in COLLECTIVES if kind not in SWAPS}
ORDER = {kind: position for position, kind in enumerate(COLLECTIVES)}
INNER_FIRST = frozenset({Collective.REDUCE_SCATTER})  # along the innermost of several axes first
MOVING = tuple(kind for kind in COLLECTIVES if kind.moves_data)
LOCAL = tuple(kind for kind in COLLECTIVES if not kind.moves_data)


class Exchange(Enum):
    """Communication that changes no layout: messages between two ranks, and rows to experts.

    As a collective, a new kind has an entry in each `ByKind`: its price, its memory.
    """

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
    if word == Exchange.RING.value:
        return Exchange.RING
    return collective_named(word)


_GRADIENT: dict[type[Placement], type[Placement]] = {
    Replicate: Partial,
    Partial: Replicate,
    Shard: Shard,
}


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
        kinds: Iterable[CommKind] = (*COLLECTIVES, *Exchange),
    ) -> None:
        if wrong := set(kinds) ^ entries.keys():
            names = ", ".join(sorted(kind.value for kind in wrong))
            raise ValueError(f"of communication {that}, {names} is missing or must not be there")
        self._that, self._entries = that, dict(entries)

    def add(self, kind: CommKind, entry: T) -> None:
        """The entry of a kind beyond `kinds`; raises `ValueError` for a second one."""
        if kind in self._entries:
            raise ValueError(f"{kind} has an entry already: communication {self._that}")
        self._entries[kind] = entry

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
        if (cut := _cut(self.src)) is not None and cut == _cut(self.dst):
            return Collective.SWAP if self.dst != cut else Collective.SWAP_BACK
        return KINDS[type(self.src), type(self.dst)]


@cache
def steps_between(src: Layout, dst: Layout) -> tuple[PlacementChange, ...]:
    """Steps that turn a tensor laid out as `src` into `dst`; empty when they are equal.

    Where two axes shard the same atom the outer one cuts first, so its
    placement can only change while the inner one does not hold that atom: the
    inner tile is gathered first and cut again afterwards. Zigzag order is left before anything
    else changes along an axis, and taken last, but cut from the whole at once.

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
            changes = [PlacementChange(a, now[a], _towards(now[a], want[a])) for a in free]
            change = min(changes, key=_turn)
            axis, target = change.axis, change.dst
        else:
            involved = {*pending, *(b for a in pending for b in _blockers(now, want, a))}
            axis = max(a for a in involved if isinstance(now[a], Shard))
            target = _towards(now[axis], REPLICATE)
        steps.append(PlacementChange(axis, now[axis], target))
        now[axis] = target
    return tuple(steps)


def _turn(change: PlacementChange) -> tuple[int, int]:
    """The order of changes that may be made now.

    The outer axis, whose links are slower, gathers tiles before the inner one makes them larger,
    and reduces them after the inner one has made them smaller.
    """
    kind = change.collective
    return ORDER[kind], -change.axis if kind in INNER_FIRST else change.axis


def _towards(now: Placement, want: Placement) -> Placement:
    """The next placement on the way from `now` to `want`."""
    if isinstance(now, Replicate):
        return want
    for end in (now, want):
        if isinstance(end, Shard) and end.zigzag and now != end.contiguous:
            return end.contiguous
    return want


def _blockers(now: list[Placement], want: list[Placement], axis: int) -> list[int]:
    """Axes that must change before `axis` can change to its wanted placement."""
    touched = [p.contiguous for p in (now[axis], want[axis]) if isinstance(p, Shard)]
    inner = [j for j in range(axis + 1, len(now)) if _cut(now[j]) in touched]
    wanted = _cut(want[axis])
    outer = [
        i
        for i in range(axis)
        if now[i] != want[i] and wanted is not None and wanted in (_cut(now[i]), _cut(want[i]))
    ]
    return inner + outer


def _cut(placement: Placement) -> Shard | None:
    """The dimension and atom that a placement cuts, in the order of neighbours."""
    return placement.contiguous if isinstance(placement, Shard) else None
