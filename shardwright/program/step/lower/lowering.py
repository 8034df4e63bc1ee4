"""Lowers the forward programs of a step's micro-batches to one step program.

The result is naive: every redistribution is a transfer right before its first reader, which waits
for it, and every gradient is reduced as soon as it is complete. Passes make it fast.

Reverse mode is done here, on instructions: the backward pass of a region is one instruction, that
of a redistribution is the redistribution of its gradient, and a recomputed segment runs again
before its backward pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.ir.buckets import sum_bucket_bytes
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.options.mixed_precision import MASTER, master_weights
from shardwright.program.instructions import (
    Move,
    Program,
    Redistribute,
    Shape,
    writes,
)
from shardwright.program.step.dead_code import without_dead
from shardwright.program.step.instructions import (
    TOTAL,
    Accumulate,
    Add,
    Backward,
    Forward,
    Gradients,
    Part,
    Relayout,
    Seed,
    StepInstruction,
    StepProgram,
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
    items,
    loads,
    op_name,
    value_types,
)

Copies = Sequence[tuple[int, str]]  # as in `Backward`


@dataclass(frozen=True)
class LoweringInput:
    """The input of the lowering of one rank's step.

    `programs` are those of its micro-batches, one after the other, without operators in place, for
    `rank` of `mesh`. `reductions` bring the sum of a parameter's gradients to where the parameter
    lies. `rewrite` is applied to each region. With `fixed_offsets` regions whose
    tiles start at different places are different regions. `alone_bytes` is the backend's, and
    `sum_bytes` the size of a bucket of gradients, None for that of `graph`. Names of values begin
    with `prefix`: that of a pipeline stage, where a rank has several.
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
    prefix: str = ""


def lower_step(step: LoweringInput, *, trains: bool = True) -> StepProgram:
    """The micro-batches one after the other, each forward and, if it `trains`, backward.

    A whole batch returns its results before a `Seed` takes their gradients.
    """
    if len(step.programs) == 1:
        return _lowered_whole(step, trains=trains)
    writer = StepWriter(step)
    seeds: list[tuple[str, str]] = []
    for number, program in enumerate(step.programs):
        batch = MicroBatchWriter(writer, program, number)
        batch.forward()
        writer.collect("out", map(batch.value, program.outputs))
        writer.collect("update", (batch.value(name) for _, name in program.updates))
        loss = program.outputs[0]
        if trains and batch.is_trained(loss):
            seeds.append((batch.value(loss), f"grad/out/0{batch.tag}"))
            batch.give(loss, seeds[-1][1])
            batch.backward()
    updates = step.programs[0].updates
    return _program(
        step,
        writer,
        seeds,
        tuple(f"out/{i}" for i in range(len(step.programs[0].outputs))),
        tuple((buffer, f"update/{i}") for i, (buffer, _) in enumerate(updates)),
    )


def _lowered_whole(step: LoweringInput, *, trains: bool) -> StepProgram:
    (program,) = step.programs
    writer = StepWriter(step)
    batch = MicroBatchWriter(writer, program, 0)
    batch.forward()
    outputs = tuple(map(batch.value, program.outputs))
    updates = tuple((buffer, batch.value(name)) for buffer, name in program.updates)
    trained = [i for i, name in enumerate(program.outputs) if batch.is_trained(name)]
    if trains and trained:
        seeds = [f"grad/out/{i}" for i in trained]
        returned = dict.fromkeys((*outputs, *(value for _, value in updates)))
        seeded = tuple(zip(trained, seeds, strict=True))
        writer.instructions.append(Seed(tuple(returned), seeded))
        for i, seed in seeded:
            batch.give(program.outputs[i], seed)
        batch.backward()
    return _program(step, writer, [], outputs, updates)


def _program(
    step: LoweringInput,
    writer: StepWriter,
    seeds: Sequence[tuple[str, str]],
    outputs: tuple[str, ...],
    updates: tuple[tuple[str, str], ...],
) -> StepProgram:
    """All that was written."""
    first = step.programs[0]
    lowered = StepProgram(
        mesh=step.mesh,
        rank=step.rank,
        regions=tuple(writer.table.regions),
        leaves=tuple(name for name in first.leaves if writer.kind[name] is not LeafKind.INPUT),
        loads=tuple(loads(first).values()),
        inputs=tuple(writer.inputs),
        seeds=tuple(seeds),
        instructions=writer.finished(step.reductions),
        outputs=outputs,
        gradients=tuple(writer.gradients.items()),
        updates=updates,
        fixed_offsets=step.fixed_offsets,
        alone_bytes=step.alone_bytes,
        sum_bytes=sum_bucket_bytes(step.graph) if step.sum_bytes is None else step.sum_bytes,
    )
    return replace(lowered, instructions=without_dead(lowered.instructions, lowered.returned))


class StepWriter:
    """State that all micro-batches share: instructions, regions, sums of gradients."""

    def __init__(self, step: LoweringInput) -> None:
        self.step = step
        self.graph = step.graph
        self.masters = master_weights(step.graph)
        self.kind = {leaf.name: leaf.kind for leaf in step.graph.leaves}
        self.table = RegionTable(step.fixed_offsets)
        self.instructions: list[StepInstruction] = []
        self.gradients: dict[str, str] = {}  # leaf -> the sum of its gradients
        self.inputs: list[tuple[str, int, str]] = []  # leaf, micro-batch, its value there
        self.shared = _shared(step.programs)
        self.gathered: set[str] = set()  # shared copies that are there
        self._handles = 0
        self._parts: dict[int, _Parts] = {}  # by the program, which is the same object

    def parts(self, program: Program) -> _Parts:
        """The stretches of a program."""
        if id(program) not in self._parts:
            self._parts[id(program)] = _Parts(self.step, program)
        return self._parts[id(program)]

    def dtype(self, leaf: str) -> str:
        """The dtype in which a leaf is given."""
        return MASTER if leaf in self.masters else self.graph.tensor[leaf].dtype

    def collect(self, prefix: str, values: Iterable[str]) -> None:
        """Add what a micro-batch returns to what those before it did."""
        for number, value in enumerate(values):
            self.instructions.append(Accumulate(f"{prefix}/{number}", value))

    def accumulate(self, leaf: str, gradient: str) -> None:
        """Add a gradient of a leaf to those that came before."""
        prefix = self.step.prefix if leaf in self.kind else ""  # values of inputs have it
        total = self.gradients.setdefault(leaf, f"{TOTAL}{prefix}{leaf}")
        self.instructions.append(Accumulate(total, gradient))

    def move(
        self, value: str, result: str, moves: Sequence[Move], atoms: Shape, shape: Shape, dtype: str
    ) -> list[StepInstruction]:
        """`result` is `value` after `moves`: one transfer for each that communicates."""
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

    def finished(self, reductions: Sequence[Redistribute]) -> tuple[StepInstruction, ...]:
        """All instructions, gradients reduced when the last micro-batch has added to them."""
        wanted = {one.value: one for one in reductions if one.value in self.gradients}
        found: list[StepInstruction] = []
        for one in reversed(self.instructions):
            total = one.total if isinstance(one, Accumulate) else ""
            leaf = total.removeprefix(f"{TOTAL}{self.step.prefix}")
            if leaf in wanted and self.gradients[leaf] == total:
                how = wanted.pop(leaf)
                result = f"{total}/reduced"
                moved = self.move(
                    total, result, how.forward, how.atoms_before, how.after, self.dtype(leaf)
                )
                found += reversed(moved)
                self.gradients[leaf] = result
            found.append(one)
        return tuple(found[::-1])


class _Parts:
    """A micro-batch's program in stretches; equal micro-batches share one."""

    def __init__(self, step: LoweringInput, program: Program) -> None:
        reduced = {one.value for one in step.reductions}
        self.program = program
        self.loads = loads(program)
        self.items = items(program, step.graph, reduced, step.rewrite)
        self.types = value_types(program, step.graph)
        self.redistributed = {
            one.instruction.result: one for one in self.items if isinstance(one, RunRedistribution)
        }
        # What each segment of recomputation has: places of items, and names of values made there.
        self.places: defaultdict[int, list[int]] = defaultdict(list)
        self.made: defaultdict[int, set[str]] = defaultdict(set)
        for place, item in enumerate(self.items):
            self.places[item.segment].append(place)
            self.made[item.segment].update(_made(item))
        self.weights = set(self.loads)  # parameters and copies of them
        for one in self.redistributed.values():
            if one.instruction.value in self.weights:
                self.weights.add(one.instruction.result)
        self.used: dict[int, tuple[int, int]] = {}  # item -> its region and variant


class MicroBatchWriter:
    """One micro-batch while it is written."""

    def __init__(self, writer: StepWriter, program: Program, number: int) -> None:
        self.writer, self.program, self.number = writer, program, number
        self.tag = f"@{number}" if len(writer.step.programs) > 1 else ""
        parts = writer.parts(program)
        self.parts, self.items, self.types = parts, parts.items, parts.types
        self.loads, self.redistributed, self.used = parts.loads, parts.redistributed, parts.used
        self.grads: dict[str, list[str]] = {}  # contributions to a value's gradient
        self.contributions: Counter[str] = Counter()
        self.again: set[str] = set()  # values that are made again, in the backward pass
        self.known_as: dict[str, str] = {}  # inputs that are values of another stage
        self.weights_left: dict[int, Copies] = {}  # stretches whose weights have no gradients yet
        stretches = (at for at, item in enumerate(self.items) if isinstance(item, Stretch))
        prefix = writer.step.prefix
        self.calls = {at: f"{prefix}r{number}{self.tag}" for number, at in enumerate(stretches)}
        for leaf in writer.graph.leaves_of(LeafKind.INPUT):
            writer.inputs.append((leaf.name, number, self.own(leaf.name)))

    def forward(self) -> None:
        """The forward pass."""
        for place, item in enumerate(self.items):
            if isinstance(item, Stretch):
                saves = not item.segment
                self.writer.instructions.append(self.run(place, item, saves=saves, again=False))
            elif item.instruction.result in self.writer.shared:
                if item.instruction.result not in self.writer.gathered:
                    self.writer.gathered.add(item.instruction.result)
                    self.redistribute(item)
            else:
                self.redistribute(item)

    def backward(self, part: Gradients = Gradients.ALL) -> None:
        """The backward pass, or a part of it, from the gradients that were given."""
        rerun: set[int] = set()
        for place, item in reversed(list(enumerate(self.items))):
            if item.segment and item.segment not in rerun:
                rerun.add(item.segment)
                if not self.grads.keys().isdisjoint(self.parts.made[item.segment]):
                    self.recompute(item.segment)
            if isinstance(item, Stretch):
                if part is Gradients.WEIGHTS:
                    self.run_backward_of_weights(place, item)
                else:
                    self.run_backward(place, item, part)
            else:
                self.redistribute_gradient(item.instruction)

    def recompute(self, segment: int) -> None:
        """Run a segment again."""
        self.again.update(self.parts.made[segment])
        for place in self.parts.places[segment]:
            item = self.items[place]
            if isinstance(item, Stretch):
                self.writer.instructions.append(self.run(place, item, saves=True, again=True))
            else:
                self.redistribute(item)

    def run(self, place: int, item: Stretch, *, saves: bool, again: bool) -> Forward:
        """One stretch forward."""
        if place not in self.used:
            self.used[place] = self.writer.table.add(
                item.instructions,
                item.inputs,
                item.outputs,
                map(self.is_trained, item.inputs),
                map(self.is_trained, item.outputs),
                (name in item.copies for name in item.inputs),
            )
        region, variant = self.used[place]
        ops = tuple(op_name(one) for one in item.instructions)
        inputs = tuple(self.value(name) for name in item.inputs)
        outputs = tuple(self.value(name) for name in item.outputs)
        return Forward(region, variant, self.calls[place], inputs, outputs, saves, again, ops)

    def run_backward(self, place: int, item: Stretch, part: Gradients) -> None:
        """One stretch backward, if a gradient of its results is known."""
        given = tuple(tuple(self.grads.pop(name, ())) for name in item.outputs)
        if not any(given):
            return
        copies: list[tuple[int, str]] = []
        for position, name in enumerate(item.inputs):
            if (copy := item.copies.get(name)) is None:
                continue
            if copy not in self.again:
                self.again.add(copy)
                self.redistribute(self.redistributed[copy])
            copies.append((position, self.value(copy)))
        if part is Gradients.INPUTS:
            self.weights_left[place] = copies
        self.add_backward(place, item, part, given, copies)

    def run_backward_of_weights(self, place: int, item: Stretch) -> None:
        """The remaining part of a stretch's backward pass."""
        if (copies := self.weights_left.pop(place, None)) is not None:
            self.add_backward(place, item, Gradients.WEIGHTS, (), copies)

    def add_backward(
        self,
        place: int,
        item: Stretch,
        part: Gradients,
        given: tuple[tuple[str, ...], ...],
        copies: Copies,
    ) -> None:
        """A backward pass, and the gradients that it makes."""
        made: list[str] = []
        for name in item.inputs:
            is_weight = name in self.parts.weights
            other = Gradients.INPUTS if is_weight else Gradients.WEIGHTS
            wanted = self.is_trained(name) and part is not other
            made.append(self.contribution(name) if wanted else "")
        region, _ = self.used[place]
        self.writer.instructions.append(
            Backward(region, self.calls[place], given, tuple(made), tuple(copies), part=part)
        )
        for name, gradient in zip(item.inputs, made, strict=True):
            if gradient:
                self.give(name, gradient)

    def redistribute(self, item: RunRedistribution) -> None:
        """A redistribution forward; without moves its result is the value itself."""
        one = item.instruction
        if not one.forward:
            return
        dtype = one.cast[0] if one.cast else self.types[one.value].dtype
        self.writer.instructions += self.writer.move(
            self.value(one.value),
            self.value(one.result),
            one.forward,
            one.atoms_before,
            one.after,
            dtype,
        )

    def redistribute_gradient(self, one: Redistribute) -> None:
        """The gradient of a redistribution's result takes its way back."""
        given = self.grads.pop(one.result, [])
        if not given or not one.differentiable:
            return
        if not one.backward and not one.cast:
            for gradient in given:
                self.give(one.value, gradient)
            return
        if len(given) > 1:
            total = self.contribution(f"{one.result}/sum")
            self.writer.instructions.append(Add(total, tuple(given)))
            given = [total]
        dtype = one.cast[1] if one.cast else self.types[one.result].dtype
        result = self.contribution(one.value)
        self.writer.instructions += self.writer.move(
            given[0], result, one.backward, one.atoms_grad, one.before, dtype
        )
        self.give(one.value, result)

    def give(self, name: str, gradient: str) -> None:
        """A contribution to the gradient of a value."""
        leaf = self.loads[name].leaf if name in self.loads else name
        if leaf in self.writer.kind:
            is_input = self.writer.kind[leaf] is LeafKind.INPUT
            self.writer.accumulate(self.own(leaf) if is_input else leaf, gradient)
        else:
            self.grads.setdefault(name, []).append(gradient)

    def contribution(self, name: str) -> str:
        """A new name for a contribution to the gradient of a value."""
        known = self.contributions[name]
        self.contributions[name] += 1
        return f"grad/{self.own(name)}{f'.{known}' if known else ''}"

    def value(self, name: str) -> str:
        """The name in the step program of a value of this micro-batch's program."""
        while (found := self.redistributed.get(name)) and not found.instruction.forward:
            name = found.instruction.value
        if name in self.loads:
            return self.loads[name].leaf
        kind = self.writer.kind.get(name)
        if kind is not None and kind is not LeafKind.INPUT:
            return name
        if name in self.known_as:
            return self.known_as[name]
        if name in self.writer.shared:
            return f"{self.writer.step.prefix}{name}"
        return f"{self.own(name)}{'~' if name in self.again else ''}"

    def own(self, name: str) -> str:
        """The name in the step program of a value that this micro-batch alone has."""
        return f"{self.writer.step.prefix}{name}{self.tag}"

    def is_trained(self, name: str) -> bool:
        """Whether a gradient of a value of the program is wanted."""
        return self.types[name].trained


def _made(item: Item) -> tuple[str, ...]:
    """Names of the values that an item makes."""
    if isinstance(item, RunRedistribution):
        return (item.instruction.result,)
    return tuple(name for one in item.instructions for name in writes(one))


def _shared(programs: Sequence[Program]) -> frozenset[str]:
    """Copies of parameters that are made once a step, for all micro-batches, and kept."""
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
