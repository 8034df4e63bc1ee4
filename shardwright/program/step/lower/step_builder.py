"""Builds what the micro-batches of a step share: instructions, regions, sums of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.options.mixed_precision import reduced_dtype, stored_dtypes
from shardwright.program.decisions import AT_ONCE, UpdateForm
from shardwright.program.instructions import (
    Move,
    Program,
    RecomputedSegment,
    Redistribute,
    Shape,
    writes,
)
from shardwright.program.lower.segments.boundaries import Boundary, boundaries
from shardwright.program.step.host_copies import HostCopy, StoreGradient
from shardwright.program.step.instructions import (
    TOTAL,
    Accumulate,
    Part,
    Relayout,
    StepInstruction,
    Transfer,
    Wait,
    after_moves,
    after_transfer,
)
from shardwright.program.step.lower.regions import RegionTable
from shardwright.program.step.lower.stretches import (
    Item,
    RunRedistribution,
    Stretch,
    communicates,
    dropped_copies,
    fetch_starts,
    items,
    loads,
    made_again,
    value_types,
    views_of_copies,
)


@dataclass(frozen=True)
class LoweringInput:
    """The input of the lowering of one rank's step.

    Attributes:
        mesh: the mesh of one group of devices.
        rank: the rank in the mesh.
        graph: the graph of the step, or of a pipeline stage.
        programs: one program per micro-batch, without operators in place.
        reductions: redistributions from the sum of a parameter's gradients to the parameter's
            layout.
        rewrite: applied to each region.
        fixed_offsets: whether regions whose tiles start at different offsets are different regions.
        alone_bytes: that of the backend (`BackendSpec`).
        sum_bytes: the size of a bucket of gradients; None for that of `graph`.
        ahead: how many buckets ahead copies of parameters are gathered.
        separates_gathers: whether they have channels of their own (`StepProgram`).
        offload: the recomputed segments whose boundaries are kept in the memory of the host.
        update: the form of the optimizer's update.
        followed: whether `graph` is that of a pipeline stage that others follow.
        prefix: the first part of names of values, that of a stage where a rank has several.
    """

    mesh: Mesh
    rank: int
    graph: Graph
    programs: Sequence[Program]
    reductions: Sequence[Redistribute] = ()
    rewrite: Callable[[Program, Graph], Program] | None = None
    fixed_offsets: bool = False
    alone_bytes: int | None = None
    sum_bytes: int | None = None
    ahead: int = 1
    offload: frozenset[int] = frozenset()
    update: UpdateForm = AT_ONCE
    followed: bool = False
    prefix: str = ""
    separates_gathers: bool = False


class StepBuilder:
    """Collects the instructions, regions and sums of gradients of all micro-batches."""

    def __init__(self, step: LoweringInput) -> None:
        self.step = step
        self.graph = step.graph
        self.stored = stored_dtypes(step.graph)
        self.kind = {leaf.name: leaf.kind for leaf in step.graph.leaves}
        self.table = RegionTable(step.fixed_offsets)
        self.instructions: list[StepInstruction] = []
        self.gradients: dict[str, str] = {}  # leaf -> the sum of its gradients
        self.inputs: list[tuple[str, int, str]] = []  # leaf, micro-batch, its value there
        self.shared = _shared(step.programs)
        self.gathered: set[str] = set()  # shared copies that were made
        self.reduced = {one.value for one in step.reductions}  # at the end of the step
        self.tiles = {one.leaf: one for program in step.programs for one in loads(program).values()}
        self._handles = 0
        self._cut: dict[int, _CutProgram] = {}  # by the program, which is the same object

    def cut(self, program: Program) -> _CutProgram:
        """A program cut into stretches; micro-batches with equal programs share it."""
        if id(program) not in self._cut:
            self._cut[id(program)] = _CutProgram(self.step, program)
        return self._cut[id(program)]

    def dtype(self, leaf: str) -> str:
        """The dtype in which a leaf is given."""
        return self.stored.get(leaf, self.graph.tensor[leaf].dtype)

    def collect(self, prefix: str, values: Iterable[str]) -> None:
        """Accumulate the values that a micro-batch returns in `prefix/0`, `prefix/1`, ..."""
        for number, value in enumerate(values):
            self.instructions.append(Accumulate(f"{prefix}/{number}", value))

    def accumulate(self, leaf: str, gradient: str) -> None:
        """Append the addition of a gradient to the sum of a leaf's gradients."""
        prefix = self.step.prefix if leaf in self.kind else ""  # values of inputs have it
        total = self.gradients.setdefault(leaf, f"{TOTAL}{prefix}{leaf}")
        if self.step.update.by_host and leaf in self.tiles and leaf not in self.reduced:
            stored = f"host/{gradient}"
            self.instructions += self.store(leaf, gradient, stored)
            gradient = stored
        self.instructions.append(Accumulate(total, gradient))

    def move(
        self, value: str, result: str, moves: Sequence[Move], atoms: Shape, shape: Shape, dtype: str
    ) -> list[StepInstruction]:
        """Instructions that make `result` from `value`: a transfer for each move that communicates.

        `atoms` is the shape before the moves, one dimension per atom, `shape` that of the result.
        """
        found: list[StepInstruction] = []
        local: list[Move] = []
        left = sum(move.collective.moves_data for move in moves)
        for move in moves:
            if not move.collective.moves_data:
                local.append(move)
                continue
            left -= 1
            last = not left and move is moves[-1]
            name = result if last else f"{result}/step{left}"
            before = after_moves(atoms, tuple(local))
            after = after_transfer(before, move)
            part = Part(value, name, atoms, tuple(local), move, shape if last else after, dtype)
            self._handles += 1
            handle = f"{self.step.prefix}t{self._handles}"
            found.append(Transfer(move.collective, move.axis, (part,), handle))
            found.append(Wait(handle, (name,)))
            value, atoms, local = name, after, []
        if local or not found:
            found.append(Relayout(value, result, atoms, tuple(local), shape, dtype))
        return found

    def copy(
        self, value: str, result: str, shape: Shape, dtype: str, way: type[HostCopy]
    ) -> list[StepInstruction]:
        """Instructions that make `result` in the other memory from `value`."""
        self._handles += 1
        handle = f"{self.step.prefix}t{self._handles}"
        started: Any = way(value, result, shape, dtype, handle)
        return [started, Wait(handle, (result,))]

    def store(self, leaf: str, gradient: str, result: str) -> list[StepInstruction]:
        """`copy` for the gradient of a parameter that is on the host."""
        return self.copy(gradient, result, self.tiles[leaf].shape, self.dtype(leaf), StoreGradient)

    def reduce(
        self, leaf: str, value: str, result: str, moves: Sequence[Move], atoms: Shape, shape: Shape
    ) -> list[StepInstruction]:
        """`move` for a gradient of a parameter, in the dtype in which the parameter is stored.

        It is sent in the dtype of reductions, and cast back afterwards.
        """
        dtype, sent = self.dtype(leaf), reduced_dtype(self.graph, leaf)
        if sent == dtype or not any(move.collective.moves_data for move in moves):
            return self.move(value, result, moves, atoms, shape, dtype)
        found = self.move(value, f"{result}/sent", moves, atoms, shape, sent)
        return [*found, Relayout(f"{result}/sent", result, shape, (), shape, dtype)]

    def finished(self, reductions: Sequence[Redistribute]) -> tuple[StepInstruction, ...]:
        """All instructions, each gradient reduced right after the last addition to it."""
        wanted = {one.value: one for one in reductions if one.value in self.gradients}
        found: list[StepInstruction] = []
        for one in reversed(self.instructions):
            total = one.total if isinstance(one, Accumulate) else ""
            leaf = total.removeprefix(f"{TOTAL}{self.step.prefix}")
            if leaf in wanted and self.gradients[leaf] == total:
                reduction = wanted.pop(leaf)
                result = f"{total}/reduced"
                moved = self.reduce(
                    leaf,
                    total,
                    result,
                    reduction.forward,
                    reduction.atoms_before,
                    reduction.after,
                )
                if self.step.update.by_host:
                    moved += self.store(leaf, result, f"host/{result}")
                    result = f"host/{result}"
                found += reversed(moved)
                self.gradients[leaf] = result
            found.append(one)
        return tuple(found[::-1])


class _CutProgram:
    """A micro-batch's program in stretches, with its copies of weights and its segments.

    It is shared by all micro-batches with that program, so that these use the same regions.
    """

    def __init__(self, step: LoweringInput, program: Program) -> None:
        reduced = {one.value for one in step.reductions}
        if step.update.by_host:
            reduced |= fetch_starts(program, step.graph)
        self.program = program
        self.loads = loads(program)
        self.items = items(program, step.graph, reduced, step.rewrite)
        self.types = value_types(program, step.graph)
        self.redistributed = {
            one.instruction.result: one for one in self.items if isinstance(one, RunRedistribution)
        }
        # For each segment of recomputation: indices of its items, and names of its values.
        self.indices: defaultdict[int, list[int]] = defaultdict(list)
        self.made: defaultdict[int, set[str]] = defaultdict(set)
        for index, item in enumerate(self.items):
            self.indices[item.segment].append(index)
            self.made[item.segment].update(_made(item))
        # Parameters and copies of them, each with the leaf.
        self.weights = {name: load.leaf for name, load in self.loads.items()}
        for one in self.redistributed.values():
            if (leaf := self.weights.get(one.instruction.value)) is not None:
                self.weights[one.instruction.result] = leaf
        self.completed = _completed(self.items, self.loads)
        self.made_again = made_again(program)
        self.views = views_of_copies(program, step.graph)
        self.offloaded = _offloaded(program, step) if step.offload else {}
        # Filled by the first micro-batch: item -> its region and variant.
        self.used: dict[int, tuple[int, int]] = {}


def _completed(items: Sequence[Item], loads: Container[str]) -> dict[int, list[Redistribute]]:
    """Redistributions of parameters before other stretches than their first reader, by that one.

    Copies that a recomputed segment keeps are made before it, but the gradient of each is complete
    when the backward pass of its first reader ends.
    """
    first: dict[str, int] = {}  # name -> the first item that reads it
    stretches = [0]  # how many there are before each item
    for index, item in enumerate(items):
        names = item.inputs if isinstance(item, Stretch) else (item.instruction.value,)
        for name in names:
            first.setdefault(name, index)
        stretches.append(stretches[-1] + isinstance(item, Stretch))
    found: defaultdict[int, list[Redistribute]] = defaultdict(list)
    for index, item in enumerate(items):
        if isinstance(item, RunRedistribution) and item.instruction.value in loads:
            reader = first.get(item.instruction.result, index)
            if stretches[reader] > stretches[index + 1] and isinstance(items[reader], Stretch):
                found[reader].append(item.instruction)
    return dict(found)


def _offloaded(program: Program, step: LoweringInput) -> dict[str, Boundary]:
    """The boundaries to offload, by name.

    Those of the last segment stay: it runs again first, and at once unless other stages follow.
    """
    numbers = [one.number for one in program.instructions if isinstance(one, RecomputedSegment)]
    found = boundaries(program, step.graph)
    last = None if step.followed else numbers[-1]
    return {one.name: one for one in found if one.segment in step.offload - {last}}


def _made(item: Item) -> tuple[str, ...]:
    """Names of the values that an item makes."""
    if isinstance(item, RunRedistribution):
        return (item.instruction.result,)
    return tuple(name for one in item.instructions for name in writes(one))


def _shared(programs: Sequence[Program]) -> frozenset[str]:
    """Copies of parameters that all micro-batches read alike: they are gathered once and kept."""
    found: set[tuple[str, Redistribute]] | None = None
    for program in programs:
        sources = set(loads(program))
        dropped = dropped_copies(program)
        mine: dict[str, Redistribute] = {}
        for one in program.instructions:
            if not isinstance(one, Redistribute) or one.value not in sources or not one.forward:
                continue
            if one.result not in dropped and communicates(one):
                mine[one.result] = one
                sources.add(one.result)
        same = set(mine.items())
        found = same if found is None else found & same
    return frozenset(name for name, _ in found or ())
