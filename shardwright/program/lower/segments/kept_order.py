"""Orders a recomputed segment so that its kept and its recomputed operators form few runs.

Each run is called by itself, forward, again and backward, which costs the host a tenth of a
millisecond a call; small operators take the device less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwright.program.instructions import (
    CALLS,
    Compute,
    Instruction,
    Joint,
    Load,
    Redistribute,
    RunModule,
    SharedAttention,
    reads,
    writes,
)


def in_few_runs(
    instructions: Sequence[Instruction], kept: frozenset[str], views: Collection[str]
) -> tuple[tuple[Instruction, ...], frozenset[str]]:
    """The instructions of a segment in another order, and the operators that run once.

    Operators follow those of their kind, kept or recomputed, as far as they do not depend on others
    and stay on their side of operators that communicate. `views` are operators without work of
    their own: one of a value that is not recomputed is kept if its first reader is.
    """
    order = _Order(instructions, kept, views)
    return order.instructions(), order.kept


class _Order:
    """The order of a segment's instructions while it is made."""

    def __init__(
        self, instructions: Sequence[Instruction], kept: frozenset[str], views: Collection[str]
    ) -> None:
        self.given, self.kept = instructions, kept
        self.lazy = self._lazy(views)  # those that come right before their first reader
        self.source = {name: i for i, one in enumerate(instructions) for name in writes(one)}
        self.made: list[int] = []
        self.done: set[int] = set()

    def instructions(self) -> tuple[Instruction, ...]:
        waiting = [i for i in range(len(self.given)) if i not in self.lazy]
        last = False
        while waiting:
            ready = self._ready(waiting)
            next_one = next((i for i in ready if self._keeps(i) == last), ready[0])
            last = self._keeps(next_one)
            self._add(next_one, last)
            waiting.remove(next_one)
        for i in self.lazy:  # those that nothing in the segment reads
            self._add(i, last)
        return tuple(self.given[i] for i in self.made)

    def _lazy(self, views: Collection[str]) -> dict[int, None]:
        """Views of values that are not recomputed, and what brings in values from outside."""
        made: set[str] = set()
        again: set[str] = set()
        found: dict[int, None] = {}
        for i, one in enumerate(self.given):
            view = isinstance(one, Compute) and one.op.name in views
            outside = isinstance(one, Load | Redistribute) and made.isdisjoint(reads(one))
            if outside or (view and again.isdisjoint(reads(one))):
                found[i] = None
            elif not self._keeps(i):
                again.update(writes(one))
            made.update(writes(one))
        return found

    def _keeps(self, i: int) -> bool:
        one = self.given[i]
        return isinstance(one, CALLS) and one.op.name in self.kept

    def _ready(self, waiting: Sequence[int]) -> list[int]:
        """The waiting instructions whose operands exist, up to the first that communicates."""
        found: list[int] = []
        for i in waiting:
            if _communicates(self.given[i]):
                return found or [i]
            if self._needs(i) <= self.done:
                found.append(i)
        return found

    def _needs(self, i: int) -> set[int]:
        """The instructions that must come before, but for lazy ones, whose own needs count."""
        found: set[int] = set()
        for name in reads(self.given[i]):
            source = self.source.get(name)
            if source is not None:
                found |= self._needs(source) if source in self.lazy else {source}
        return found

    def _add(self, i: int, keeps: bool) -> None:
        """Add an instruction, after the lazy ones that it reads, which are kept if it is."""
        if i in self.done:
            return
        one = self.given[i]
        for name in reads(one):
            source = self.source.get(name)
            if source in self.lazy and source is not None:
                self._add(source, keeps)
        self.made.append(i)
        self.done.add(i)
        if i in self.lazy and isinstance(one, Compute):
            op = frozenset({one.op.name})
            self.kept = self.kept | op if keeps else self.kept - op


def _communicates(one: Instruction) -> bool:
    """Whether an instruction may communicate, so that its place decides about overlap."""
    if isinstance(one, Compute):
        return one.routing is not None
    return isinstance(one, Redistribute | Joint | SharedAttention | RunModule)
