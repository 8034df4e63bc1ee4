"""The programs of one rank of an asynchronous pipeline's stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.async_pipeline.lowering import (
    STAGE_PASSES,
    evaluation_of,
    lower_stage,
)
from shardwright.program.step.async_pipeline.steady_call import steady_call
from shardwright.program.step.optimize import Pass, optimized
from shardwright.program.step.step_program import StepProgram


class StagePrograms(NamedTuple):
    """A call in training, and an evaluation."""

    call: StepProgram
    evaluation: StepProgram


def stage_programs(
    staged: StagedGraph, rank: int, passes: Sequence[Pass] = STAGE_PASSES
) -> StagePrograms:
    """The programs of `rank`, counted over all groups, after `passes`."""
    assert staged.weights is not None, "the pipeline is asynchronous"
    both = optimized(lower_stage(staged, rank, in_place), passes)
    stage, _ = staged.decisions.stage_ranks.position(rank)
    stages = staged.pipeline.stages
    return StagePrograms(steady_call(both, staged.weights, stage, stages), evaluation_of(both))
