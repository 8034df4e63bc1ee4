"""Memory of a step whose program is that of a graph with few of many equal layers.

Sections on both sides of a gap allocate and free equal memory, which is checked for each
instruction. Each omitted section changes the memory by the same amount, so memory is largest at one
end of the gap: the peak of the whole step is that of the few layers, shifted by the change of the
omitted sections.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Bytes
from shardwright.ir.memory import NOTHING, Memory
from shardwright.ir.op_memory import OpTracer
from shardwright.program.instructions import DRAWS_BY_INDEX
from shardwright.program.step.folding.sections import (
    FoldedGraph,
    NotPeriodicError,
    Section,
    Sections,
)
from shardwright.program.step.folding.steady_passes import steady_cycles
from shardwright.program.step.instructions import Forward
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.simulate.costs.update import UpdatedTile
from shardwright.simulate.memory.allocator import AllocatedBytes, Allocator, Block, Use
from shardwright.simulate.memory.caching_allocator import Request, reserved_bytes
from shardwright.simulate.memory.step.rank_step import StepSimulation, Trainer, random_key_bytes
from shardwright.simulate.memory.step.spanned_program import SpannedProgram, spanned
from shardwright.simulate.memory.step.whole_requests import Recorded, whole_order, whole_requests
from shardwright.simulate.memory.values import View

_NOTHING = AllocatedBytes(0, 0)


class FoldedStep:
    """The step of `whole` on a rank; `lowering` is that of the folded graph."""

    def __init__(
        self,
        whole: Graph,
        folded: FoldedGraph,
        lowering: PlanLowering,
        rank: int,
        trainer: Trainer,
        book: OpTracer,
    ) -> None:
        self.whole, self.folded, self.trainer = whole, folded, trainer
        self.step = StepSimulation(lowering, rank, trainer, book)
        self.step.temporaries = not folded.stands_for  # else only the whole step's are known
        self.tiles: dict[str, UpdatedTile] = {}  # that the step updates
        self._recorded: Recorded | None = None  # requests while `peak` played the step
        self._room = 0  # bytes for temporaries of the update, below the peak before it

    def memory(self, sections: Sections) -> Memory:
        """`Memory` of the whole step if only micro-batches were left out.

        Raises `NotPeriodicError` if their passes need different memory, or change the peak.
        """
        self.step.record()
        peak = self.peak(sections)
        found = self.step.of_peak(sections.program, self.tiles)
        if found.peak != peak:
            raise NotPeriodicError("micro-batches that were left out are a part of the peak")
        return found

    def reserved(self, sections: Sections) -> Bytes | None:
        """`Memory.reserved` of the whole step; None if few layers do not tell.

        Raises `NotPeriodicError` as `peak` does.
        """
        step, spec = self.step, self.trainer.optimizer
        step.record()
        if step.allocator.requests is None:
            return NOTHING
        repeats = step.lowering.repeat(step.group) is not None
        if spec.keeps_gradients or repeats or not self.folded.stands_for:
            return None
        self.peak(sections)
        if self._recorded is None:
            return None
        own = [name for name in self.tiles if name not in self.folded.stands_for]
        try:
            requests = whole_requests(sections, self._recorded)
            order = whole_order(own, self.folded)
        except NotPeriodicError:
            return None
        if len(order) != len(self.tiles):
            return None
        tiles = [self.tiles[name] for name in order]
        if tiles:  # which groups there are depends on the order
            step.decide_groups(tiles, self._room)
            update = self.trainer.update(tiles, step.group_bytes)
            requests += [Request(-1, update, taken) for taken in (True, False)]
        stored = self._stored(sections)
        before = [stored[leaf.name] for leaf in self.whole.leaves if leaf.name in stored]
        state = [tile.bytes for tile in tiles for _ in range(spec.resident_of(tile.shape))]
        return Bytes(reserved_bytes([self._given(sections), *before], requests, state))

    def peak(self, sections: Sections) -> Bytes:
        """`Memory.peak` of the whole step, from its program in sections.

        Raises `NotPeriodicError` if layers on both sides of a gap need different memory.
        """
        step, allocator = self.step, self.step.allocator
        whole, repeat = spanned(sections), step.lowering.repeat(step.group)
        cycles = None if repeat is None else steady_cycles(sections.program, repeat)
        heights = _Heights(whole, allocator)
        if cycles is not None and repeat is not None:
            heights.grow(cycles, repeat.times - 1)
        self.tiles = tiles = step.played(whole.program, heights.observe)
        if step.allocator.requests is not None and not heights.gives_back:
            given = step.allocator.requests, heights.requests, heights.copies, whole
            self._recorded = Recorded(*given)
        heights.check()
        for name, like in self.folded.stands_for.items():
            if like in tiles:
                tiles[name] = tiles[like]
        skipped = _NOTHING
        peak = heights.highest[0]
        found: list[tuple[Section, AllocatedBytes]] = []
        for section, seam in sections.with_seams():
            if seam is not None and section.start not in whole.written:
                first, second = (heights.changes(one) for one in seam)
                if first != second:
                    raise NotPeriodicError("layers on both sides of a gap need different memory")
                skipped = skipped.plus(first[-1][1], sections.skipped[section.gap])
                skipped = skipped.plus(heights.copied(section.start), -1)
            found.append((section, skipped))
        if cycles is not None:
            _require_equal(cycles, heights, found)
        for section, skipped in found:
            for at in whole.places(section.start, section.stop):
                level = heights.highest[at].plus(skipped)
                peak = max(peak, level, key=lambda level: level.total)
        last, granularity = allocator.level.plus(skipped), allocator.granularity
        self._room = peak.total - last.total
        if self.folded.stands_for:
            step.decide_groups(tiles.values(), self._room)
        update = self.trainer.update(tiles.values(), step.group_bytes)
        last = last.plus(AllocatedBytes(update, -update % granularity))
        peak = max(peak, last, key=lambda level: level.total)
        return Bytes(peak.total + peak.rounded + self._lasting(tiles, sections))

    def _lasting(self, tiles: dict[str, UpdatedTile], sections: Sections) -> int:
        """Bytes before the step: parameters, state of the optimizer, inputs and buffers."""
        spec, granularity = self.trainer.optimizer, self.step.allocator.granularity
        odd = self.trainer.rounding(tiles.values(), granularity)
        state = sum(tile.resident_bytes(spec) for tile in tiles.values())
        return sum(self._stored(sections).values()) + state + odd + self._given(sections)

    def _stored(self, sections: Sections) -> dict[str, int]:
        """Bytes of the parameters of all layers that are on the device, by name."""
        step, present = self.step, set(sections.program.leaves)
        stored = {
            leaf.name: step.resident(leaf.name)
            for leaf in self.folded.graph.leaves_of(LeafKind.PARAMETER)
            if leaf.name in present
        }
        left_out = self.folded.stands_for.items()
        stored.update((name, stored[like]) for name, like in left_out if like in stored)
        return stored

    def _given(self, sections: Sections) -> int:
        """Bytes of inputs, buffers, constants, and the positions of random numbers."""
        present = set(sections.program.leaves)
        present.update(name for name, like in self.folded.stands_for.items() if like in present)
        given = sum(
            self.whole.tensor[leaf.name].bytes
            for leaf in self.whole.leaves
            if leaf.kind is LeafKind.INPUT
            or (leaf.kind is not LeafKind.PARAMETER and leaf.name in present)
        )
        return given + self.step.keys + self._keys_left_out(sections)

    def _keys_left_out(self, sections: Sections) -> int:
        """Bytes of the positions of random numbers of layers that were left out."""
        program = sections.program
        layers: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for at, one in enumerate(program.instructions):
            if isinstance(one, Forward):
                section = sections.at[at]
                layers[one.region, one.variant].add((section.gap, section.layer))
        sizes: defaultdict[tuple[int, int], int] = defaultdict(int)
        for (region, variant), found in layers.items():
            if len(found) == 1:
                (layer,) = found
                sizes[layer] += sum(
                    random_key_bytes(one)
                    for one in program.regions[region].variants[variant]
                    if isinstance(one, DRAWS_BY_INDEX)
                )
        if any(sizes[gap, -1] != sizes[gap, 0] for gap in range(len(sections.skipped))):
            raise NotPeriodicError("layers on both sides of a gap draw different random numbers")
        return sum(times * sizes[gap, 0] for gap, times in enumerate(sections.skipped))


def _require_equal(
    cycles: tuple[Section, Section],
    heights: _Heights,
    skipped: Sequence[tuple[Section, AllocatedBytes]],
) -> None:
    """Raise `NotPeriodicError` if the passes of two cycles need different memory.

    `skipped` has, for each section, what the layers before it that were left out add.
    """
    one, other = cycles
    before, behind = (
        next(bytes for section, bytes in skipped if section.start <= at.start < section.stop)
        for at in cycles
    )
    if before != behind or heights.changes(one) != heights.changes(other):
        raise NotPeriodicError("passes of two cycles of micro-batches need different memory")


class _Heights:
    """Records the bytes that are alive before a program and after each of its instructions."""

    def __init__(self, whole: SpannedProgram, allocator: Allocator) -> None:
        self.whole, self.allocator = whole, allocator
        self.levels: list[AllocatedBytes] = []
        self.highest: list[AllocatedBytes] = []  # since the last
        self.requests: list[int] = []  # that were made so far, where they are recorded
        # Of those requests the copies: the block that each is a copy of, and which of its copies.
        self.copies: dict[int, tuple[int, int]] = {}
        self.gives_back = False  # whether a gap gives back memory, in no order of layers
        self._parts: list[Block] = []  # that have other owners than the copied values
        self._behind: dict[int, AllocatedBytes] = {}  # with copies, by the place of a gap
        self._cycle: tuple[int, int, int] | None = None  # begin and end, and how often it is added
        self._before_cycle = 0, 0  # changes, and rounded bytes

    def observe(self, values: dict[str, View]) -> None:
        """Record the bytes; at a gap, copy and free the values of the layers that were left out."""
        at = len(self.levels)
        self.levels.append(self.allocator.level)
        self.requests.append(len(self.allocator.requests or ()))
        self.highest.append(self.allocator.highest())
        copies, drops = self.whole.copies.get(at, ()), self.whole.drops.get(at, ())
        for number, names in enumerate(copies):
            self._copy(values, names, number)
        copied = len(self.allocator.requests or ())
        for name in drops:
            if (view := values.pop(name, None)) is not None:
                self.allocator.drop(view.block)
        self.gives_back |= len(self.allocator.requests or ()) > copied
        grows = self._cycle is not None and self._grows(at, *self._cycle)
        if copies or drops or grows:
            self._behind[at] = self.allocator.level
            self.allocator.highest()

    def grow(self, cycles: tuple[Section, Section], times: int) -> None:
        """Let what stays from the first of two cycles stay so many times more.

        It is allocated where the second one begins.
        """
        one, other = (self.whole.place(cycle.start) for cycle in cycles)
        self._cycle = one, other, times

    def _grows(self, at: int, begin: int, end: int, times: int) -> bool:
        """Whether what stays from a cycle is allocated at this place."""
        if at == begin:
            self._before_cycle = self.allocator.changes, self.allocator.rounded
        elif at == end:
            since, rounded = self._before_cycle
            self.allocator.grow(since, self.allocator.rounded - rounded, times)
        return at == end

    def check(self) -> None:
        """Raise `NotPeriodicError` if memory was freed of which copies are only a part."""
        if any(block.owners == 0 for block in self._parts):
            raise NotPeriodicError("values of all layers are a part of memory that is given back")

    def copied(self, start: int) -> AllocatedBytes:
        """The bytes that were copied before the section that starts there, less those freed."""
        at = self.whole.place(start)
        return self._behind.get(at, self.levels[at]).plus(self.levels[at], -1)

    def changes(self, section: Section) -> list[tuple[AllocatedBytes, AllocatedBytes]]:
        """Bytes beyond those before a section: of each instruction, at its peak and after it."""
        at = self.whole.place(section.start)
        before = self._behind.get(at, self.levels[at])
        return [
            (self.highest[at].plus(before, -1), self.levels[at].plus(before, -1))
            for at in self.whole.places(section.start, section.stop)
        ]

    def _copy(self, values: dict[str, View], names: Mapping[str, str], number: int) -> None:
        """Copy each named value to new memory under another name; it is copy `number` of these.

        Values that share memory, as those of one bucket do, have copies that share memory.
        """
        owned = Counter(id(values[name].block) for name in names if name in values)
        copies: dict[int, Block] = {}
        for name, other in names.items():
            view = values.get(name)
            if view is None:
                raise NotPeriodicError(f"%{name} is not there at the end of its layer")
            block = view.block
            if block.use is Use.LASTING:
                values[other] = view
                continue
            if id(block) in copies:
                self.allocator.own(copies[id(block)])
            else:
                self.copies[len(self.allocator.requests or ())] = id(block), number
                new = self.allocator.new(block.bytes, block.use, module_of=block)
                copies[id(block)] = new
                if block.owners > owned[id(block)]:  # the rest stays until the end
                    self.allocator.own(new)
                    self._parts.append(block)
            values[other] = replace(view, block=copies[id(block)])
