from dataclasses import replace

import pytest

from shardwright.ir.layout import Replicate
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Backward, Transfer, Wait
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.program.step.lower.purposes import Purpose, purposes
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(4)
EXPANSION = Expansion(GRAPH, preset("4xH100"), "adamw")


def events(strategy):
    """Starts and waits of transfers of gradients, and backward passes, in their order."""
    plan = EXPANSION.expanded(Strategy.parse(strategy)).plan(0.0, ())
    analysis = EXPANSION.sources.analysis
    program = PlanLowering(GRAPH, analysis, read_plan(plan, GRAPH, analysis), None).program(0)
    known = purposes(program)
    for one in program.instructions:
        if isinstance(one, Backward):
            yield "backward"
        elif isinstance(one, Transfer | Wait) and known.get(one.handle) is Purpose.GRADIENT:
            yield "start" if isinstance(one, Transfer) else "wait"


def test_sums_in_place_are_waited_for_behind_all_backward_passes():
    found = list(events("dp_replicate=4"))
    assert found.index("start") < found.index("backward", found.index("start"))
    assert found.count("start") > 1
    assert found[found.index("wait") :] == ["wait"] * found.count("start")


@pytest.mark.parametrize("zero", [1, 2])
def test_stages_wait_for_sums_of_totals_behind_all_backward_passes(zero):
    """A stage that waits in its last micro-batch delays all stages before it."""
    found = list(events(f"pp=2 dp_shard=2 mb=4 sync=last zero={zero}"))
    last = max(i for i, event in enumerate(found) if event == "backward")
    assert found.count("start") > 1 and "start" in found[:last]
    assert "wait" not in found[:last]


@pytest.mark.parametrize("strategy", ["dp_shard=4", "dp_shard=4 mb=2"])
def test_one_buffer_of_a_transfer_is_in_use(strategy):
    in_flight = 0
    for event in events(strategy):
        in_flight += {"start": 1, "wait": -1, "backward": 0}[event]
        assert 0 <= in_flight <= 1


def test_second_sums_of_recomputed_layers_start_between_backward_passes():
    """Gradients of parameters that no device shards are summed along one axis, then the other."""
    graph = residual_layers(4, scaled=True)
    expansion = Expansion(graph, preset("4xH100"), "adamw")
    plan = expansion.expanded(Strategy.parse("dp_replicate=2 dp_shard=2 ac=full")).plan(0.0, ())
    whole = [
        replace(one, layout=replace(one.layout, placements=(Replicate(), Replicate())))
        if "scale" in one.name
        else one
        for one in plan.parameters
    ]
    plan, analysis = replace(plan, parameters=tuple(whole)), expansion.sources.analysis
    program = PlanLowering(graph, analysis, read_plan(plan, graph, analysis), None).program(0)
    sums = [
        one.channel if isinstance(one, Transfer) else "backward"
        for one in program.instructions
        if isinstance(one, Backward)
        or (isinstance(one, Transfer) and "scale" in one.parts[0].value)
    ]
    second = [at for at, word in enumerate(sums) if word == "dp_shard"]
    assert len(second) == sums.count("dp_replicate") == 4
    assert all("backward" in sums[at:] for at in second[:-1])  # all but that of the last layer
