"""Simulates an asynchronous pipeline: calls of its groups' programs from empty to empty.

The pipeline is not flushed between updates, so the timeline has several mini-batches, and a step is
what one more of them takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Plan
from shardwright.ir.timeline import Timeline
from shardwright.program.step.async_pipeline.call_sequence import in_sequence
from shardwright.program.step.step_program import StepProgram
from shardwright.simulate.time.stages import simulated_stages, stages_seconds
from shardwright.simulate.time.step_program import StepPrices

_MINI_BATCHES = 3  # of a timeline, for each stage


def mini_batches(plan: Plan) -> int:
    """The number of mini-batches in the timeline of `plan`; 1 unless it is asynchronous."""
    return _MINI_BATCHES * plan.stages if plan.is_asynchronous else 1


def simulated_calls(
    plan: Plan, programs: Sequence[StepProgram], prices: StepPrices, names: Sequence[str]
) -> tuple[Timeline, Seconds]:
    """The timeline of `plan` with its `mini_batches`, and the seconds of a step.

    Args:
        plan: an asynchronous plan.
        programs: the program of one rank of each group.
        prices: the prices of all groups.
        names: the name of each group.
    """
    count, every = mini_batches(plan), [prices] * len(programs)
    whole = simulated_stages([in_sequence(one, count) for one in programs], every, names)
    fewer = count - plan.stages  # the pipeline is full in both
    part = stages_seconds([in_sequence(one, fewer) for one in programs], every)
    return whole, Seconds((whole.seconds - part) / plan.stages)
