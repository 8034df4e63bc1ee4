"""Values lead to the parameters whose gradients they become."""

from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.folding.gradients import becoming_gradients
from shardwright.program.step.instructions import Transfer
from shardwright.program.step.lower.plan_lowering import PlanLowering
from tests.harness.layered_graphs import residual_layers


def program_of(graph, strategy):
    expansion = Expansion(graph, preset("2x4xH100"), "adamw")
    plan = expansion.expanded(Strategy.parse(strategy)).plan(0.0, ())
    analysis = expansion.sources.analysis
    return PlanLowering(graph, analysis, read_plan(plan, graph, analysis), None).program(0)


def test_values_lead_to_the_parameter_whose_gradient_they_become():
    graph = residual_layers(3)
    program = program_of(graph, "dp_replicate=2 dp_shard=4")
    becomes = becoming_gradients(program)
    for leaf, value in program.gradients:
        assert becomes[value] == (leaf, 0)
    sent = {
        (leaf, one.channel): steps
        for one in program.instructions
        if isinstance(one, Transfer)
        for leaf, steps in (becomes[part.value] for part in one.parts if part.value in becomes)
    }
    for leaf, _ in program.gradients:  # a reduce-scatter, and a sum over replicas behind it
        assert sent[leaf, "dp_shard"] == sent[leaf, "dp_replicate"] + 1
