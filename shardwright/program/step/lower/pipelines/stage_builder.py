"""Builds the instructions of one pipeline stage of a rank, for all its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.graph import LeafKind
from shardwright.program.lower.mixed_precision import with_casts
from shardwright.program.lower.pipeline import Crossing, StagedGraph
from shardwright.program.lower.rank_program import verify
from shardwright.program.lower.stages import splits_backward
from shardwright.program.step.instructions import TOTAL, Add, Payload, StepInstruction
from shardwright.program.step.lower.micro_batch_builder import MicroBatchBuilder
from shardwright.program.step.lower.regions import RegionTable
from shardwright.program.step.lower.step_builder import LoweringInput, StepBuilder
from shardwright.program.step.lower.stretches import Rewrite


def stage_prefix(staged: StagedGraph, stage: int) -> str:
    """The prefix of names of a stage's values; empty where each group has one stage."""
    return f"s{stage}." if staged.pipeline.stages > staged.pipeline.groups else ""


class StageBuilder:
    """Builds one stage of a group; all stages of the group append to the same `instructions`."""

    def __init__(
        self,
        staged: StagedGraph,
        stage: int,
        position: int,
        rewrite: Rewrite | None,
        table: RegionTable,
        same_as: Sequence[int],
        instructions: list[StepInstruction],
    ) -> None:
        self.staged, self.stage, self.position = staged, stage, position
        self.part = staged.parts[stage]
        graph = self.part.graph
        self.splits = splits_backward(self.part)
        firsts = sorted(set(same_as))
        lowered = staged.programs(stage, position, firsts)
        distinct = [with_casts(program, graph) for program in lowered.programs]
        for program in distinct:
            verify(program)
        self.programs = [distinct[firsts.index(number)] for number in same_as]
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
            offload=staged.decisions.offloaded,
            followed=stage + 1 < staged.pipeline.stages,
            prefix=self.prefix,
        )
        self.builder = StepBuilder(step)
        # All stages of a rank append to one list, in the schedule's order, and share regions.
        self.builder.table, self.builder.instructions = table, instructions
        self.batches = [
            MicroBatchBuilder(self.builder, program, number)
            for number, program in enumerate(self.programs)
        ]
        self.names = {leaf.name for leaf in graph.leaves}

    def before(self, number: int) -> tuple[Crossing, ...]:
        """The values that the stage receives from the previous stage in a micro-batch."""
        return self.staged.crossing(self.stage - 1, number, self.position)

    def behind(self, number: int) -> tuple[Crossing, ...]:
        """The values that the stage sends to the next stage in a micro-batch."""
        return self.staged.crossing(self.stage, number, self.position)

    def returned(self, batch: MicroBatchBuilder) -> list[str]:
        """Names of the sent values of a micro-batch whose gradients are received."""
        pairs = zip(batch.program.outputs, self.behind(batch.number), strict=True)
        return [name for name, one in pairs if one.differentiable]

    def read_from(self, number: int, before: StageBuilder) -> None:
        """Name the received values as the previous stage does, which is in the same group."""
        theirs = before.batches[number]
        values = map(theirs.value, theirs.program.outputs)
        self.batches[number].known_as.update(zip(self.part.received, values, strict=True))

    def received_gradients(self, number: int) -> tuple[Payload, ...]:
        """The gradients of the received values; a missing gradient becomes zeros."""
        batch = self.batches[number]
        found = []
        for name, one in zip(self.part.received, self.before(number), strict=True):
            if one.differentiable:
                value = batch.own(name)
                total = self.builder.gradients.get(value)
                if total is None:
                    total = self.builder.gradients[value] = f"{TOTAL}{value}"
                    self.builder.instructions.append(Add(total, ()))
                found.append(Payload(total, one.shape, one.dtype))
        return tuple(found)

    def collect(self, batch: MicroBatchBuilder) -> None:
        """Accumulate the outputs and the new buffers of a forward pass."""
        if self.stage == len(self.staged.parts) - 1:
            self.builder.collect("out", map(batch.value, batch.program.outputs))
        updates = (batch.value(name) for _, name in batch.program.updates)
        self.builder.collect(f"{self.prefix}update", updates)

    def updates(self) -> list[tuple[str, str]]:
        """Pairs of an updated buffer and the value that it gets."""
        buffers = (buffer for buffer, _ in self.programs[0].updates)
        return [(buffer, f"{self.prefix}update/{i}") for i, buffer in enumerate(buffers)]

    def leaves(self) -> list[str]:
        """Parameters, buffers and constants of the stage."""
        kind = self.builder.kind
        return [name for name in self.programs[0].leaves if kind[name] is not LeafKind.INPUT]

    def inputs(self) -> list[tuple[str, int, str]]:
        """Triples of a prefixed leaf of the batch, a micro-batch, and the leaf's value there."""
        received = set(self.part.received)
        return [
            (f"{self.prefix}{leaf}", number, value)
            for leaf, number, value in self.builder.inputs
            if leaf not in received
        ]

    def reduced(self) -> dict[str, str]:
        """Insert the reductions of gradients; return the gradient of each parameter."""
        parameters = {leaf.name for leaf in self.part.graph.leaves_of(LeafKind.PARAMETER)}
        self.builder.instructions[:] = self.builder.finished(self.reductions)
        gradients = self.builder.gradients
        return {leaf: total for leaf, total in gradients.items() if leaf in parameters}
