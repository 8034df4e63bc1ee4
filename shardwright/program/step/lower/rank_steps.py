"""Step programs of the ranks of a plan, from its decisions alone."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.plan import PlanError
from shardwright.program.decisions import Decisions
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.async_pipeline.lowering import STAGE_PASSES
from shardwright.program.step.async_pipeline.stage_programs import stage_programs
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.pipelines.pipeline import lower_pipeline
from shardwright.program.step.lower.step_builder import LoweringInput
from shardwright.program.step.lower.whole_batch import whole_step
from shardwright.program.step.optimize import PASSES, STEP_PASSES, Pass, optimized
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import micro_batches


def passes_named(text: str) -> Sequence[Pass]:
    """The passes that a text names, in the order in which a step has them.

    Args:
        text: `all`, `naive` for none, or names with commas between, in any order.

    Returns:
        The passes; for `all` those of `step_program` by default.

    Raises:
        PlanError: for a name that no pass has.
    """
    if text in ("all", "naive"):
        return STEP_PASSES if text == "all" else ()
    wanted = [name.strip() for name in text.split(",")]
    names = [one.__name__ for one in STEP_PASSES]
    if unknown := [name for name in wanted if name not in names]:
        raise PlanError(f"{unknown[0]!r} is no pass; give all, naive or some of {', '.join(names)}")
    return tuple(one for one in STEP_PASSES if one.__name__ in wanted)


def check_rank(pipeline: Pipeline | None, mesh: Mesh, rank: int) -> None:
    """Raise `PlanError` for a rank that the plan does not have.

    `mesh` is that of layouts: in a pipeline that of one group.
    """
    ranks = mesh.size * (1 if pipeline is None else pipeline.groups)
    if not 0 <= rank < ranks:
        raise PlanError(f"rank {rank} is none of the plan's {ranks} ranks; give 0 to {ranks - 1}")


def step_of(graph: Graph, analysis: Analysis, decisions: Decisions, rank: int) -> LoweringInput:
    """The input of the lowering of the step of `rank`."""
    if decisions.micro_batches == 1:
        return whole_step(graph, analysis, decisions, rank, in_place)
    batches = micro_batches(graph, analysis, decisions.micro_batches)
    return micro_batched_step(graph, analysis, batches, decisions, rank, in_place)


def step_program(
    graph: Graph,
    analysis: Analysis,
    decisions: Decisions,
    rank: int,
    passes: Sequence[Pass] = STEP_PASSES,
) -> StepProgram:
    """The step program of `rank` after `passes`; of an asynchronous pipeline that of a call.

    Raises `PlanError` as `check_rank` does, and for a pass that the plan's kind of step never has.
    """
    check_rank(decisions.pipeline, decisions.mesh, rank)
    if decisions.pipeline is None:
        return optimized(lower_step(step_of(graph, analysis, decisions, rank)), passes)
    staged = StagedGraph(graph, analysis, decisions)
    if staged.weights is not None:
        return stage_programs(staged, rank, _of_kind(passes, STAGE_PASSES)).call
    # Its results are summed behind everything else, so none is made later.
    return optimized(lower_pipeline(staged, rank, in_place), _of_kind(passes, PASSES))


def _of_kind(passes: Sequence[Pass], known: Sequence[Pass]) -> Sequence[Pass]:
    """`passes`, or by default all that a kind of step has; `PlanError` for one that it has not."""
    if passes is STEP_PASSES:
        return known
    if other := [one.__name__ for one in passes if one not in known]:
        names = ", ".join(one.__name__ for one in known)
        raise PlanError(f"the step of this plan never has the pass {other[0]}; it has {names}")
    return passes
