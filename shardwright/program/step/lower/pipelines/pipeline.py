"""Lowers the stages of one pipeline group to one step program.

The schedule orders the forward and backward passes of all stages and micro-batches. A value that
another group reads is sent right after it is computed; its reader waits for it right before the
pass. Gradients are accumulated over micro-batches and reduced after the last one; gradients of a
parameter that several stages hold are then summed over those stages. Every group returns the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from shardwright.ir.buckets import sum_bucket_bytes
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh, local_atoms
from shardwright.ir.pipeline import AXIS, whole_mesh
from shardwright.ir.redistribution import Collective
from shardwright.ir.schedules.schedule import Kind
from shardwright.program.instructions import Load, Move, Program, Shape, flat
from shardwright.program.lower.pipeline import StagedGraph
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
    Transfer,
    Wait,
)
from shardwright.program.step.lower.micro_batch_builder import MicroBatchBuilder
from shardwright.program.step.lower.pipelines.messages import Message, PassMessages, steps
from shardwright.program.step.lower.pipelines.stage_builder import StageBuilder
from shardwright.program.step.lower.regions import RegionTable
from shardwright.program.step.lower.stretches import Rewrite, loads
from shardwright.program.step.lower.update import update_of
from shardwright.program.step.step_program import StepProgram

_PARTS = {
    Kind.BACKWARD: Gradients.ALL,
    Kind.INPUTS: Gradients.INPUTS,
    Kind.WEIGHTS: Gradients.WEIGHTS,
}


def pipeline_mesh(staged: StagedGraph) -> Mesh:
    """The mesh of all groups: the axes of a group, and that of the pipeline."""
    return whole_mesh(staged.decisions.mesh, staged.pipeline.groups)


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
    same_as: Sequence[int] | None = None,
    sum_bytes: int | None = None,
) -> StepProgram:
    """Lower the step of `rank`, counted over all groups.

    `rewrite` is applied to each region. A simulation may give `same_as`: for each micro-batch the
    number of an equally large one whose operators the program has instead, which may be fewer than
    the plan's micro-batches; and `sum_bytes`, as in `LoweringInput`.
    """
    every = range(staged.decisions.micro_batches)
    program = _GroupBuilder(staged, rank, rewrite, same_as or every).build()
    return program if sum_bytes is None else replace(program, sum_bytes=sum_bytes)


class _GroupBuilder:
    """Builds the step program of one rank from the stages of its group."""

    def __init__(
        self, staged: StagedGraph, rank: int, rewrite: Rewrite | None, same_as: Sequence[int]
    ) -> None:
        self.staged, self.rank = staged, rank
        self.group, self.position = staged.decisions.stage_ranks.position(rank)
        self.count = len(same_as)  # micro-batches
        self.instructions: list[StepInstruction] = []
        table = RegionTable(staged.graph.numerics.rng == "fast")
        homes = staged.pipeline.homes
        self.stages = {
            stage: StageBuilder(
                staged, stage, self.position, rewrite, table, same_as, self.instructions
            )
            for stage, home in enumerate(homes)
            if home == self.group
        }
        self.table = table
        self.seeds: list[tuple[str, str]] = []
        self.received: dict[Message, tuple[Payload, ...]] = {}
        self._handles = 0

    def build(self) -> StepProgram:
        """Lower all passes in the order of the schedule, then reductions, loss and update."""
        pipeline = self.staged.pipeline
        count = self.count
        mine = steps(pipeline.schedule, pipeline.groups, pipeline.stages, count)[self.group]
        waiting: dict[Message, str] = {}  # handles of messages that were sent and not waited for
        for step in mine:
            self.step(step, waiting)
        self.instructions += [Wait(handle, ()) for handle in waiting.values()]
        gradients = self.gradients()
        outputs = self.loss()
        stages = self.stages.values()
        tiles = _loads([stage.programs[0] for stage in stages])
        form, graph = self.staged.decisions.update, self.staged.graph
        self.instructions += update_of(gradients.items(), self.kinds, graph, tiles, form)
        program = StepProgram(
            mesh=pipeline_mesh(self.staged),
            rank=self.rank,
            regions=tuple(self.table.regions),
            leaves=tuple(dict.fromkeys(name for stage in stages for name in stage.leaves())),
            loads=tiles,
            inputs=tuple(one for stage in stages for one in stage.inputs()),
            seeds=tuple(self.seeds),
            instructions=tuple(self.instructions),
            outputs=outputs,
            gradients=tuple(gradients.items()),
            updates=tuple(one for stage in stages for one in stage.updates()),
            fixed_offsets=self.table.fixed_offsets,
            sum_bytes=sum_bucket_bytes(self.staged.graph),
            ahead=self.staged.decisions.ahead,
            separates_gathers=self.staged.decisions.separates_gathers,
        )
        return replace(program, instructions=without_dead(program.instructions, program.returned))

    def step(self, step: PassMessages, waiting: dict[Message, str]) -> None:
        """Append one pass, its receives before it and its send behind it.

        `waiting` has the handles of sends that were not waited for.
        """
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
                stage.read_from(one.number, before)
            batch.forward()
            stage.collect(batch)
        else:
            self.backward(step, stage, batch)
        if step.sent is not None:
            waiting[step.sent] = self.send(step.sent)

    def backward(self, step: PassMessages, stage: StageBuilder, batch: MicroBatchBuilder) -> None:
        """Append a backward pass.

        It begins with the gradient of the loss in the last stage, and in others with the gradients
        of the values that the stage sent.
        """
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
        """Append the receive of a message."""
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
        """The wait for a message whose receive was appended."""
        payload = self.received[message]
        return Wait(_handle(message, "from"), tuple(one.value for one in payload))

    def send(self, message: Message) -> str:
        """Append the send of a message; return its handle."""
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
        """Append reductions and sums over stages; return the gradient of each parameter."""
        found: dict[str, list[str]] = {}
        for stage in self.stages.values():
            for leaf, total in stage.reduced().items():
                if leaf in self.staged.graph.trained:  # autograd gives no other one a gradient
                    found.setdefault(leaf, []).append(total)
        shared = shared_parameters(self.staged)
        for leaf in shared:  # this group may hold the parameter without a gradient of it
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
        return {name: kind for s in self.stages.values() for name, kind in s.builder.kind.items()}

    def tile(self, leaf: str) -> tuple[Shape, str]:
        """The shape and dtype of this rank's tile of a parameter, and so of its gradient."""
        staged = self.staged
        at = staged.decisions.mesh.coordinate(self.position)
        tile = local_atoms(staged.analysis.atoms[leaf], staged.decisions.storage[leaf], at)
        stage = next(stage for stage in self.stages.values() if leaf in stage.names)
        return flat(tile), stage.builder.dtype(leaf)

    def loss(self) -> tuple[str, ...]:
        """Append the sum of the loss over all groups, of which only the last has a term."""
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
        """Append the sum of `value` over `groups`; return its name.

        `tile` has the shape and dtype of the value. With one group the sum is the value itself.
        """
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
