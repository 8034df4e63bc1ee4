"""Gives gathers of parameters a channel of their own where they would wait for reductions.

Operations of one communicator run in the order in which they are started, so a gather that is
prefetched in the backward part waits for a reduce-scatter of gradients that was started before it
along the same axis, although no value depends on it. FSDP2 (`set_separate_reduce_scatter_group`)
and Megatron-LM (`--create-all-gather-group`) make a second communicator on request, as this pass
does: it takes memory of the device, and links carry no more than before.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.program.step.channels import gathers
from shardwright.program.step.instructions import StepInstruction, Transfer, Wait
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.step_program import StepProgram

_BOTH = frozenset({Purpose.COPY, Purpose.GRADIENT})


def separate_gathers(program: StepProgram) -> StepProgram:
    """`program` with another channel for copies of parameters, if it `separates_gathers`.

    Only along axes on which a copy and a reduction of gradients are in flight at the same time.
    """
    if not program.separates_gathers:
        return program
    known = purposes(program)
    in_flight: dict[str, Transfer] = {}
    axes: set[str] = set()
    for one in program.instructions:
        if isinstance(one, Transfer):
            in_flight[one.handle] = one
            along = (each for each in in_flight.values() if each.channel == one.channel)
            if _BOTH.issubset(known[each.handle] for each in along):
                axes.add(one.channel)
        elif isinstance(one, Wait):
            in_flight.pop(one.handle, None)

    def moved(one: StepInstruction) -> StepInstruction:
        if not isinstance(one, Transfer) or known[one.handle] is not Purpose.COPY:
            return one
        return replace(one, channel=gathers(one.channel)) if one.channel in axes else one

    return replace(program, instructions=tuple(map(moved, program.instructions)))
