"""Lowers the stages of one pipeline group to one step program.

The forward and backward passes of each stage and micro-batch come in the order of the schedule.
What crosses to another group is sent as soon as it is made, and received right before its reader.
Gradients are accumulated, and reduced after the last micro-batch; those of a parameter that several
stages have are summed once more. Every group returns the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from shardwright.ir.buckets import sum_bucket_bytes
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh, local_atoms
from shardwright.ir.pipeline import AXIS
from shardwright.ir.redistribution import Collective
from shardwright.ir.schedules.schedule import Kind
from shardwright.program.instructions import Load, Move, Program, Shape, flat
from shardwright.program.lower.mixed_precision import with_casts
from shardwright.program.lower.pipeline import Crossing, StagedGraph
from shardwright.program.lower.rank_program import verify
from shardwright.program.lower.stages import splits_backward
from shardwright.program.step.channels import between, link
from shardwright.program.step.dead_code import without_dead
from shardwright.program.step.instructions import (
    TOTAL,
    Accumulate,
    Add,
    Gradients,
    Part,
    Payload,
    Recv,
    Send,
    StepInstruction,
    StepProgram,
    Transfer,
    Wait,
)
from shardwright.program.step.lower.messages import Message, PassMessages, steps
from shardwright.program.step.lower.micro_batch_writer import MicroBatchWriter
from shardwright.program.step.lower.regions import RegionTable
from shardwright.program.step.lower.step_writer import LoweringInput, StepWriter, update_of
from shardwright.program.step.lower.stretches import Rewrite, loads

_PARTS = {
    Kind.BACKWARD: Gradients.ALL,
    Kind.INPUTS: Gradients.INPUTS,
    Kind.WEIGHTS: Gradients.WEIGHTS,
}


def pipeline_mesh(staged: StagedGraph) -> Mesh:
    """The mesh of all groups: the pipeline's axis, and then those of a group."""
    return Mesh(((AXIS, staged.pipeline.groups), *staged.decisions.mesh.axes))


def stage_prefix(staged: StagedGraph, stage: int) -> str:
    """The prefix of names of a stage's values; empty where each group has one stage."""
    return f"s{stage}." if staged.pipeline.stages > staged.pipeline.groups else ""


def shared_parameters(staged: StagedGraph) -> dict[str, tuple[int, ...]]:
    """The trained parameters that several groups hold, with the groups."""
    homes = staged.pipeline.homes
    found = {}
    for name, stages in staged.holders.items():
        groups = tuple(sorted({homes[stage] for stage in stages}))
        if len(groups) > 1 and staged.graph.tensor[name].requires_grad:
            found[name] = groups
    return found


def pipeline_channels(staged: StagedGraph) -> tuple[str, ...]:
    """The channels between groups that programs of any rank use, besides the axes of the mesh."""
    homes, groups = staged.pipeline.homes, staged.pipeline.groups
    pairs = {pair for pair in pairwise(homes) if pair[0] != pair[1]}
    links = [link(*pair) for pair in sorted({*pairs, *((b, a) for a, b in pairs)})]
    shared = {some for some in shared_parameters(staged).values() if len(some) < groups}
    return (*links, *(between(some) for some in sorted(shared)))


def lower_pipeline(
    staged: StagedGraph,
    rank: int,
    rewrite: Rewrite | None = None,
    *,
    trains: bool = True,
    like: Sequence[int] | None = None,
) -> StepProgram:
    """The step of `rank` of all groups; without backward passes if it does not train.

    Regions are as `rewrite` leaves them. `like` has for each micro-batch one whose operators it
    runs instead of its own, for a simulation; None is itself.
    """
    every = range(staged.decisions.micro_batches)
    return _GroupWriter(staged, rank, rewrite, like or every).written(trains=trains)


class _GroupWriter:
    """One rank's program while it is written."""

    def __init__(
        self, staged: StagedGraph, rank: int, rewrite: Rewrite | None, like: Sequence[int]
    ) -> None:
        self.staged, self.rank = staged, rank
        self.group, self.position = divmod(rank, staged.decisions.mesh.size)
        self.instructions: list[StepInstruction] = []
        table = RegionTable(staged.graph.numerics.rng == "fast")
        homes = staged.pipeline.homes
        self.stages = {
            stage: _StageWriter(
                staged, stage, self.position, rewrite, table, like, self.instructions
            )
            for stage, home in enumerate(homes)
            if home == self.group
        }
        self.table = table
        self.seeds: list[tuple[str, str]] = []
        self.received: dict[Message, tuple[Payload, ...]] = {}
        self._handles = 0

    def written(self, *, trains: bool) -> StepProgram:
        """The whole program."""
        pipeline = self.staged.pipeline
        mine = steps(
            pipeline.schedule, pipeline.groups, pipeline.stages, self.staged.decisions.micro_batches
        )[self.group]
        waiting: dict[Message, str] = {}  # what was sent and not waited for
        for step in mine:
            if trains or step.one.kind is Kind.FORWARD:
                self.step(step, waiting)
        self.instructions += [Wait(handle, ()) for handle in waiting.values()]
        gradients = self.gradients() if trains else {}
        outputs = self.loss()
        self.instructions += update_of(gradients.items(), self.kinds)
        stages = self.stages.values()
        program = StepProgram(
            mesh=pipeline_mesh(self.staged),
            rank=self.rank,
            regions=tuple(self.table.regions),
            leaves=tuple(dict.fromkeys(name for stage in stages for name in stage.leaves())),
            loads=_loads([stage.programs[0] for stage in stages]),
            inputs=tuple(one for stage in stages for one in stage.inputs()),
            seeds=tuple(self.seeds),
            instructions=tuple(self.instructions),
            outputs=outputs,
            gradients=tuple(gradients.items()),
            updates=tuple(one for stage in stages for one in stage.updates()),
            fixed_offsets=self.table.fixed_offsets,
            sum_bytes=sum_bucket_bytes(self.staged.graph),
        )
        return replace(program, instructions=without_dead(program.instructions, program.returned))

    def step(self, step: PassMessages, waiting: dict[Message, str]) -> None:
        """One pass, with its messages."""
        one, stage = step.one, self.stages[step.one.stage]
        batch = stage.batches[one.number]
        for message in step.posts:
            self.post(message)
        if step.received is not None:
            self.instructions.append(self.arrival(step.received))
        for message in step.known_sent:
            if message in waiting:
                self.instructions.append(Wait(waiting.pop(message), ()))
        if one.kind is Kind.FORWARD:
            before = self.stages.get(one.stage - 1)
            if step.received is None and before is not None:
                stage.takes(one.number, before)
            batch.forward()
            stage.collect(batch)
        else:
            self.backward(step, stage, batch)
        if step.sent is not None:
            waiting[step.sent] = self.send(step.sent)

    def backward(self, step: PassMessages, stage: _StageWriter, batch: MicroBatchWriter) -> None:
        """A backward pass: of its gradients, those of the loss or of what was sent come first."""
        one, part = step.one, _PARTS[step.one.kind]
        if part is not Gradients.ALL and not stage.splits:
            if part is Gradients.WEIGHTS:
                return
            part = Gradients.ALL
        if part is not Gradients.WEIGHTS:
            if one.stage == self.staged.pipeline.stages - 1:
                loss = batch.program.outputs[0]
                self.seeds.append((batch.value(loss), f"grad/out/0{batch.tag}"))
                batch.give(loss, self.seeds[-1][1])
            elif step.received is not None:
                payload = self.received[step.received]
                for name, gradient in zip(stage.returned(batch), payload, strict=True):
                    batch.give(name, gradient.value)
            else:
                behind = self.stages[one.stage + 1]
                for name, gradient in zip(
                    stage.returned(batch), behind.received_gradients(one.number), strict=True
                ):
                    batch.give(name, gradient.value)
        batch.backward(part)

    def post(self, message: Message) -> None:
        """Start to receive a message."""
        stage = self.stages[message.target]
        batch = stage.batches[message.number]
        if message.backward:
            values = [batch.contribution(name) for name in stage.returned(batch)]
            crossing = [one for one in stage.behind(message.number) if one.differentiable]
        else:
            values = [batch.value(name) for name in stage.part.received]
            crossing = list(stage.before(message.number))
        payload = tuple(
            Payload(value, one.shape, one.dtype)
            for value, one in zip(values, crossing, strict=True)
        )
        self.received[message] = payload
        channel = link(self.home(message.source), self.group)
        handle = _handle(message, "from")
        self.instructions.append(Recv(payload, channel, handle, message.backward))

    def arrival(self, message: Message) -> Wait:
        """The wait for a message that was posted."""
        payload = self.received[message]
        return Wait(_handle(message, "from"), tuple(one.value for one in payload))

    def send(self, message: Message) -> str:
        """Start to send a message; its handle."""
        stage = self.stages[message.source]
        batch = stage.batches[message.number]
        if message.backward:
            payload = stage.received_gradients(message.number)
        else:
            payload = tuple(
                Payload(batch.value(name), one.shape, one.dtype)
                for name, one in zip(
                    batch.program.outputs, stage.behind(message.number), strict=True
                )
            )
        handle = _handle(message, "to")
        channel = link(self.group, self.home(message.target))
        self.instructions.append(Send(payload, channel, handle, message.backward))
        return handle

    def home(self, stage: int) -> int:
        return self.staged.pipeline.homes[stage]

    def gradients(self) -> dict[str, str]:
        """The gradients of all parameters: reduced, and summed over stages."""
        found: dict[str, list[str]] = {}
        for stage in self.stages.values():
            for leaf, total in stage.reduced().items():
                if leaf in self.staged.graph.trained:  # autograd gives no other one a gradient
                    found.setdefault(leaf, []).append(total)
        shared = shared_parameters(self.staged)
        for leaf in shared:  # of which this group has a copy, but no gradient
            if any(leaf in stage.names for stage in self.stages.values()):
                found.setdefault(leaf, [])
        gradients = {}
        for leaf, terms in sorted(found.items()):
            total = f"{TOTAL}{leaf}"
            if len(terms) == 1:
                (total,) = terms
            elif terms:
                self.instructions += [Accumulate(total, term) for term in terms]
            else:
                self.instructions.append(Add(total, ()))
            if leaf in shared:
                total = self.sum_over(shared[leaf], total, f"{TOTAL}{leaf}/shared", self.tile(leaf))
            gradients[leaf] = total
        return gradients

    @property
    def kinds(self) -> dict[str, LeafKind]:
        """The kinds of the leaves of the group's stages."""
        return {name: kind for s in self.stages.values() for name, kind in s.writer.kind.items()}

    def tile(self, leaf: str) -> tuple[Shape, str]:
        """The shape and dtype of this rank's tile of a parameter, and so of its gradient."""
        staged = self.staged
        at = staged.decisions.mesh.coordinate(self.position)
        tile = local_atoms(staged.analysis.atoms[leaf], staged.decisions.storage[leaf], at)
        stage = next(stage for stage in self.stages.values() if leaf in stage.names)
        return flat(tile), stage.writer.dtype(leaf)

    def loss(self) -> tuple[str, ...]:
        """The loss, which the group of the last stage has."""
        staged = self.staged
        (name,) = staged.graph.outputs
        if staged.pipeline.stages - 1 not in self.stages:
            self.instructions.append(Add("out/0", ()))
        tile = (), staged.graph.tensor[name].dtype
        groups = tuple(range(staged.pipeline.groups))
        return (self.sum_over(groups, "out/0", "out/0/shared", tile),)

    def sum_over(
        self, groups: Sequence[int], value: str, result: str, tile: tuple[Shape, str]
    ) -> str:
        """The sum of `value` over groups; its name. One alone has it."""
        count = self.staged.pipeline.groups
        if count == 1:
            return value
        shape, dtype = tile
        move = Move(AXIS, Collective.ALL_REDUCE, shape, -1, -1, 0, 0, True)
        part = Part(value, result, shape, (), move, shape, dtype)
        channel = AXIS if len(groups) == count else between(groups)
        self._handles += 1
        handle = f"shared{self._handles}"
        self.instructions.append(Transfer(Collective.ALL_REDUCE, channel, (part,), handle))
        self.instructions.append(Wait(handle, (result,)))
        return result


class _StageWriter:
    """One stage of the rank's group while it is written; all of them write one list."""

    def __init__(
        self,
        staged: StagedGraph,
        stage: int,
        position: int,
        rewrite: Rewrite | None,
        table: RegionTable,
        like: Sequence[int],
        instructions: list[StepInstruction],
    ) -> None:
        self.staged, self.stage, self.position = staged, stage, position
        self.part = staged.parts[stage]
        graph = self.part.graph
        self.splits = splits_backward(self.part)
        firsts = sorted(set(like))
        lowered = staged.programs(stage, position, firsts)
        distinct = [with_casts(program, graph) for program in lowered.programs]
        for program in distinct:
            verify(program)
        self.programs = [distinct[firsts.index(number)] for number in like]
        self.reductions = lowered.reductions
        self.prefix = stage_prefix(staged, stage)
        mesh = staged.decisions.mesh
        step = LoweringInput(
            mesh,
            position,
            graph,
            self.programs,
            lowered.reductions,
            rewrite,
            fixed_offsets=table.fixed_offsets,
            prefix=self.prefix,
        )
        self.writer = StepWriter(step)
        self.writer.table, self.writer.instructions = table, instructions
        self.batches = [
            MicroBatchWriter(self.writer, program, number)
            for number, program in enumerate(self.programs)
        ]
        self.names = {leaf.name for leaf in graph.leaves}

    def before(self, number: int) -> tuple[Crossing, ...]:
        """The values that come from the stage before in a micro-batch."""
        return self.staged.crossing(self.stage - 1, number, self.position)

    def behind(self, number: int) -> tuple[Crossing, ...]:
        """The values that go to the stage behind."""
        return self.staged.crossing(self.stage, number, self.position)

    def returned(self, batch: MicroBatchWriter) -> list[str]:
        """Names, in the program of a micro-batch, of values whose gradients come back."""
        pairs = zip(batch.program.outputs, self.behind(batch.number), strict=True)
        return [name for name, one in pairs if one.differentiable]

    def takes(self, number: int, before: _StageWriter) -> None:
        """Read what the stage before, of the same group, hands on."""
        theirs = before.batches[number]
        values = map(theirs.value, theirs.program.outputs)
        self.batches[number].known_as.update(zip(self.part.received, values, strict=True))

    def received_gradients(self, number: int) -> tuple[Payload, ...]:
        """The gradients of what comes from the stage before, zeros where there are none."""
        batch = self.batches[number]
        found = []
        for name, one in zip(self.part.received, self.before(number), strict=True):
            if one.differentiable:
                value = batch.own(name)
                total = self.writer.gradients.get(value)
                if total is None:
                    total = self.writer.gradients[value] = f"{TOTAL}{value}"
                    self.writer.instructions.append(Add(total, ()))
                found.append(Payload(total, one.shape, one.dtype))
        return tuple(found)

    def collect(self, batch: MicroBatchWriter) -> None:
        """Add up what a forward pass returns."""
        if self.stage == len(self.staged.parts) - 1:
            self.writer.collect("out", map(batch.value, batch.program.outputs))
        updates = (batch.value(name) for _, name in batch.program.updates)
        self.writer.collect(f"{self.prefix}update", updates)

    def updates(self) -> list[tuple[str, str]]:
        """The buffers that the stage updates, with their new content."""
        buffers = (buffer for buffer, _ in self.programs[0].updates)
        return [(buffer, f"{self.prefix}update/{i}") for i, buffer in enumerate(buffers)]

    def leaves(self) -> list[str]:
        """Parameters, buffers and constants of the stage."""
        kind = self.writer.kind
        return [name for name in self.programs[0].leaves if kind[name] is not LeafKind.INPUT]

    def inputs(self) -> list[tuple[str, int, str]]:
        """The stage's part of the batch; its leaves are named with the stage's prefix."""
        received = set(self.part.received)
        return [
            (f"{self.prefix}{leaf}", number, value)
            for leaf, number, value in self.writer.inputs
            if leaf not in received
        ]

    def reduced(self) -> dict[str, str]:
        """The gradient of each parameter of the stage, where it lies; reductions are written."""
        parameters = {leaf.name for leaf in self.part.graph.leaves_of(LeafKind.PARAMETER)}
        self.writer.instructions[:] = self.writer.finished(self.reductions)
        gradients = self.writer.gradients
        return {leaf: total for leaf, total in gradients.items() if leaf in parameters}


def _handle(message: Message, word: str) -> str:
    """A name of a message: values of micro-batch 1 that go to stage 2 are `v1to2`."""
    other = message.target if word == "to" else message.source
    return f"{'g' if message.backward else 'v'}{message.number}{word}{other}"


def _loads(programs: Sequence[Program]) -> tuple[Load, ...]:
    """Loads of parameters, each once; stages take a shared one in the same shape."""
    found: dict[str, Load] = {}
    for program in programs:
        for one in loads(program).values():
            known = found.setdefault(one.leaf, one)
            assert known.shape == one.shape, f"{one.leaf} is loaded in two shapes"
    return tuple(found.values())
