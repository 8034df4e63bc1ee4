"""Prices one strategy: expands it to a plan and simulates its time and memory."""

from __future__ import annotations

from shardwright.ir.graph import Graph
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.optimizers import placed
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.arguments import require_graph
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.form import form_of
from shardwright.planner.strategies.unpriced import require_recipe


def as_strategy(given: object) -> Strategy:
    """The given strategy, or the strategy of a text; raises `StrategyError` for anything else."""
    if isinstance(given, Strategy):
        return given
    if isinstance(given, str):
        return Strategy.parse(given)
    raise StrategyError(
        f"strategy is a {type(given).__name__}; give a Strategy or a text such as 'dp_shard=8 tp=8'"
    )


@paused()
def price(
    graph: Graph, machine: Machine, strategy: Strategy, optimizer: str, tracer: OpTracer
) -> Plan:
    """The plan of a strategy, with the time and memory of its step program.

    Parameters are gathered as many buckets ahead as make it faster and as the devices have memory.
    It has no lower bound, because nothing else is searched. Raises `StrategyError` if the strategy
    does not fit the model or the machine, or has no price yet.
    """
    require_graph(graph)
    require_recipe(strategy, machine)
    graph = form_of(graph, strategy)
    strategy = strategy.in_form(graph.numerics)
    expansion = Expansion(graph, machine, placed(optimizer, strategy.offload))
    plan = expansion.plan(strategy)
    analysis = expansion.sources.analysis
    refinement = Refinement(graph, machine, optimizer, tracer, analysis)
    found = refinement.deepened(refinement.settled(plan), machine.device.usable_bytes)
    return refinement.settled(found)
