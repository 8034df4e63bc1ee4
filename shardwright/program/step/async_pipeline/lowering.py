"""Lowers a stage of an asynchronous pipeline to the two passes of one mini-batch.

Up to the `Seed` it is the forward pass, then the backward pass and the update. The loss travels
with the gradients, so that every stage returns it. `steady_call.py` makes them passes of different
mini-batches.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.buckets import sum_bucket_bytes
from shardwright.program.decisions import AT_ONCE
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.channels import link
from shardwright.program.step.dead_code import forward_only, without_dead
from shardwright.program.step.instructions import Payload, Recv, Seed, Send, StepInstruction, Wait
from shardwright.program.step.lower.pipelines.pipeline import pipeline_mesh
from shardwright.program.step.lower.pipelines.stage_builder import StageBuilder
from shardwright.program.step.lower.regions import RegionTable
from shardwright.program.step.lower.stretches import Rewrite, loads
from shardwright.program.step.lower.update import update_of
from shardwright.program.step.optimize import Pass
from shardwright.program.step.passes.bucket import bucket
from shardwright.program.step.passes.delay_waits import delay_waits
from shardwright.program.step.passes.free import free
from shardwright.program.step.passes.fuse import fuse
from shardwright.program.step.passes.overlap_sums import overlap_sums
from shardwright.program.step.passes.prefetch import prefetch
from shardwright.program.step.step_program import StepProgram

VALUES_IN, VALUES_OUT = "values/in", "values/out"
GRADIENTS_IN, GRADIENTS_OUT = "gradients/in", "gradients/out"
_LOSS, _LOSS_GRADIENT = "out/0", "grad/out/0"

# There is one message of each kind, and gradients of one mini-batch are all there is to add up.
STAGE_PASSES: tuple[Pass, ...] = (overlap_sums, bucket, fuse, prefetch, delay_waits)


def lower_stage(staged: StagedGraph, rank: int, rewrite: Rewrite | None = None) -> StepProgram:
    """Lower both passes of a mini-batch on `rank`, counted over all groups.

    `rewrite` is applied to each region.
    """
    return _StageProgram(staged, rank, rewrite).build()


def evaluation_of(passes: StepProgram) -> StepProgram:
    """The program that evaluates a mini-batch, given that of both passes.

    The loss goes back to the first stage in messages without gradients.
    """
    messages = [one for one in passes.messages() if one.backward]
    returning: list[StepInstruction] = []
    for one in messages:
        results = (one.payload[0].value,) if isinstance(one, Recv) else ()
        returning += [replace(one, payload=one.payload[:1]), Wait(one.handle, results)]
    last = not any(isinstance(one, Recv) for one in messages)
    forward = forward_only(passes if last else replace(passes, outputs=()))
    instructions = (*forward.instructions, *returning)
    return free(replace(forward, outputs=passes.outputs, instructions=instructions))


class _StageProgram:
    """Builds the program of one rank of a stage."""

    def __init__(self, staged: StagedGraph, rank: int, rewrite: Rewrite | None) -> None:
        self.staged, self.rank = staged, rank
        self.stage, position = staged.decisions.stage_ranks.position(rank)
        self.is_last = self.stage == staged.pipeline.stages - 1
        self.table = RegionTable(staged.graph.numerics.rng == "fast")
        self.instructions: list[StepInstruction] = []
        self.built = StageBuilder(
            staged, self.stage, position, rewrite, self.table, (0,), self.instructions
        )
        (self.batch,) = self.built.batches
        (name,) = staged.graph.outputs
        self.loss = Payload(_LOSS, (), staged.graph.tensor[name].dtype)
        self.seeds: tuple[tuple[str, str], ...] = ()

    def build(self) -> StepProgram:
        """Lower both passes, the reductions and the update."""
        self.forward()
        self.backward()
        gradients = {
            leaf: total
            for leaf, total in sorted(self.built.reduced().items())
            if leaf in self.staged.graph.trained
        }
        if self.stage:
            self.instructions.append(Wait(GRADIENTS_OUT, ()))
        (program,) = self.built.programs
        kind, graph, tiles = self.built.builder.kind, self.staged.graph, loads(program).values()
        # All at once: planning does not simulate the memory of these calls.
        self.instructions += update_of(gradients.items(), kind, graph, tiles, AT_ONCE)
        found = StepProgram(
            mesh=pipeline_mesh(self.staged),
            rank=self.rank,
            regions=tuple(self.table.regions),
            leaves=tuple(self.built.leaves()),
            loads=tuple(loads(program).values()),
            inputs=tuple(self.built.inputs()),
            seeds=self.seeds,
            instructions=tuple(self.instructions),
            outputs=(self.loss.value,),
            gradients=tuple(gradients.items()),
            updates=tuple(self.built.updates()),
            fixed_offsets=self.table.fixed_offsets,
            sum_bytes=sum_bucket_bytes(self.staged.graph),
            ahead=self.staged.decisions.ahead,
        )
        return replace(found, instructions=without_dead(found.instructions, found.returned))

    def forward(self) -> None:
        """Append the forward pass, the messages around it, and the seed behind it."""
        add, built = self.instructions.append, self.built
        if self.stage:
            crossing = built.before(0)
            received = tuple(
                Payload(self.batch.value(name), one.shape, one.dtype)
                for name, one in zip(built.part.received, crossing, strict=True)
            )
            add(Recv(received, link(self.stage - 1, self.stage), VALUES_IN))
            add(Wait(VALUES_IN, tuple(one.value for one in received)))
        self.batch.forward()
        built.collect(self.batch)
        if not self.is_last:
            outputs = zip(self.batch.program.outputs, built.behind(0), strict=True)
            sent = tuple(
                Payload(self.batch.value(name), one.shape, one.dtype) for name, one in outputs
            )
            add(Send(sent, link(self.stage, self.stage + 1), VALUES_OUT))
        results = [value for _, value in built.updates()]
        add(Seed((*results, *((self.loss.value,) if self.is_last else ())), ()))

    def backward(self) -> None:
        """Append the backward pass and the messages around it."""
        add, built, batch = self.instructions.append, self.built, self.batch
        if self.is_last:
            loss = batch.program.outputs[0]
            self.seeds = ((self.loss.value, _LOSS_GRADIENT),)
            batch.give(loss, _LOSS_GRADIENT)
        else:
            names = built.returned(batch)
            crossing = [one for one in built.behind(0) if one.differentiable]
            gradients = [
                Payload(batch.contribution(name), one.shape, one.dtype)
                for name, one in zip(names, crossing, strict=True)
            ]
            message = (self.loss, *gradients)
            add(Recv(message, link(self.stage + 1, self.stage), GRADIENTS_IN, backward=True))
            add(Wait(GRADIENTS_IN, tuple(one.value for one in message)))
            add(Wait(VALUES_OUT, ()))  # they were received before their gradients were computed
            for name, one in zip(names, gradients, strict=True):
                batch.give(name, one.value)
        batch.backward()
        if self.stage:
            back = (self.loss, *built.received_gradients(0))
            add(Send(back, link(self.stage, self.stage - 1), GRADIENTS_OUT, backward=True))
