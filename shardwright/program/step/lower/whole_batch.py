"""Prepares the program of a whole batch for lowering to a step program."""

from __future__ import annotations

from shardwright.ir.graph import Graph
from shardwright.program.decisions import Decisions
from shardwright.program.lower.rank_program import lower
from shardwright.program.step.lower.micro_batches import prepared
from shardwright.program.step.lower.step_builder import LoweringInput
from shardwright.program.step.lower.stretches import Rewrite
from shardwright.rules.analysis import Analysis


def whole_step(
    graph: Graph,
    analysis: Analysis,
    decisions: Decisions,
    rank: int,
    rewrite: Rewrite | None = None,
) -> LoweringInput:
    """The input of lowering for a step of `rank` with a whole batch; `rewrite` is for regions."""
    return LoweringInput(
        decisions.mesh,
        rank,
        graph,
        [prepared(lower(graph, analysis, decisions, rank), graph)],
        rewrite=rewrite,
        fixed_offsets=graph.numerics.rng == "fast",
        ahead=decisions.ahead,
        offload=decisions.offloaded,
        update=decisions.update,
        separates_gathers=decisions.separates_gathers,
    )
