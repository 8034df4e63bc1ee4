"""Lowers the forward programs of a step's micro-batches to one step program.

The result is naive: every redistribution is a transfer right before its first reader, which waits
for it, and every gradient is reduced as soon as it is complete. Passes make it fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.ir.buckets import sum_bucket_bytes
from shardwright.ir.graph import LeafKind
from shardwright.program.step.dead_code import without_dead
from shardwright.program.step.instructions import Seed
from shardwright.program.step.lower.micro_batch_builder import MicroBatchBuilder
from shardwright.program.step.lower.step_builder import LoweringInput, StepBuilder
from shardwright.program.step.lower.stretches import loads
from shardwright.program.step.lower.update import update_of
from shardwright.program.step.step_program import StepProgram


def lower_step(step: LoweringInput) -> StepProgram:
    """Lower the micro-batches one after the other, each forward and then backward.

    A whole batch returns its results before a `Seed` takes their gradients.
    """
    if len(step.programs) == 1:
        return _lowered_whole(step)
    builder = StepBuilder(step)
    seeds: list[tuple[str, str]] = []
    for number, program in enumerate(step.programs):
        batch = MicroBatchBuilder(builder, program, number)
        batch.forward()
        builder.collect("out", map(batch.value, program.outputs))
        builder.collect("update", (batch.value(name) for _, name in program.updates))
        loss = program.outputs[0]
        if batch.is_trained(loss):
            seeds.append((batch.value(loss), f"grad/out/0{batch.tag}"))
            batch.give(loss, seeds[-1][1])
            batch.backward()
    updates = step.programs[0].updates
    return _program(
        step,
        builder,
        seeds,
        tuple(f"out/{i}" for i in range(len(step.programs[0].outputs))),
        tuple((buffer, f"update/{i}") for i, (buffer, _) in enumerate(updates)),
    )


def _lowered_whole(step: LoweringInput) -> StepProgram:
    """The program of a whole batch, which takes gradients of its results at a `Seed`."""
    (program,) = step.programs
    builder = StepBuilder(step)
    batch = MicroBatchBuilder(builder, program, 0)
    batch.forward()
    outputs = tuple(map(batch.value, program.outputs))
    updates = tuple((buffer, batch.value(name)) for buffer, name in program.updates)
    trained = [i for i, name in enumerate(program.outputs) if batch.is_trained(name)]
    if trained:
        seeds = [f"grad/out/{i}" for i in trained]
        returned = dict.fromkeys((*outputs, *(value for _, value in updates)))
        seeded = tuple(zip(trained, seeds, strict=True))
        builder.instructions.append(Seed(tuple(returned), seeded))
        for i, seed in seeded:
            batch.give(program.outputs[i], seed)
        batch.backward()
    return _program(step, builder, [], outputs, updates)


def _program(
    step: LoweringInput,
    builder: StepBuilder,
    seeds: Sequence[tuple[str, str]],
    outputs: tuple[str, ...],
    updates: tuple[tuple[str, str], ...],
) -> StepProgram:
    """The program of all instructions, and the update of all parameters that have a gradient."""
    first = step.programs[0]
    instructions = builder.finished(step.reductions)
    # A region gives zeros for a parameter whose results are detached; autograd gives None.
    idle = {leaf.name for leaf in step.graph.leaves_of(LeafKind.PARAMETER)} - step.graph.trained
    gradients = tuple(one for one in builder.gradients.items() if one[0] not in idle)
    tiles = tuple(loads(first).values())
    instructions += update_of(gradients, builder.kind, step.graph, tiles, step.update)
    lowered = StepProgram(
        mesh=step.mesh,
        rank=step.rank,
        regions=tuple(builder.table.regions),
        leaves=tuple(name for name in first.leaves if builder.kind[name] is not LeafKind.INPUT),
        loads=tiles,
        inputs=tuple(builder.inputs),
        seeds=tuple(seeds),
        instructions=instructions,
        outputs=outputs,
        gradients=gradients,
        updates=updates,
        fixed_offsets=step.fixed_offsets,
        alone_bytes=step.alone_bytes,
        sum_bytes=sum_bucket_bytes(step.graph) if step.sum_bytes is None else step.sum_bytes,
        ahead=step.ahead,
        on_host=tuple((one.leaf, builder.dtype(one.leaf)) for one in tiles)
        if step.update.by_host
        else (),
        separates_gathers=step.separates_gathers,
    )
    return replace(lowered, instructions=without_dead(lowered.instructions, lowered.returned))
