"""A second search is made where messages take longer than the operators that hide them."""

from dataclasses import replace

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Phase, PlannedTransfer
from shardwright.machine.presets import preset
from shardwright.planner import planner
from shardwright.planner.slow_networks import _needs_another
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(6)
FAST = preset("4x2xH100")


def slowed(machine, times):
    """The machine with links between hosts that are slower by so many times."""
    *inner, network = machine.levels
    return replace(
        machine, levels=(*inner, replace(network, bytes_per_s=network.bytes_per_s / times))
    )


@pytest.fixture
def searches(monkeypatch):
    """The frontiers of all searches, with the machine of each."""
    made = []
    joint = planner._joint

    def kept(graph, machine, *given):
        found = joint(graph, machine, *given)
        made.append((machine, found))
        return found

    monkeypatch.setattr(planner, "_joint", kept)
    return made


def test_fast_networks_and_machines_that_hide_nothing_need_one_search(searches):
    search(GRAPH, FAST)
    search(GRAPH, replace(slowed(FAST, 100), overlap=0.0))
    assert [machine.charges_hidden for machine, _ in searches] == [False, False]


def test_the_faster_plan_of_both_searches_is_found_and_the_closer_bound(searches):
    machine = slowed(FAST, 10)
    found = search(GRAPH, machine, PlanOptions.of(stages=(1,)))
    (_, first), (other, second) = searches
    assert other == replace(machine, charges_hidden=True)
    steps = [one.fastest() for one in (first, second)]
    best = found.fastest()
    assert best.step_seconds == min(one.step_seconds for one in steps)
    assert second.fastest().step_seconds < 0.8 * first.fastest().step_seconds
    alone = search(GRAPH, slowed(FAST, 1000), PlanOptions.of(stages=(1,)))[0]
    assert not any(alone.mesh.names[0] in move for t in alone.transfers for move in t.collectives)
    shown = second.settled(replace(alone, machine=machine.name))  # sends nothing between hosts
    assert second.least_within(alone.peak_bytes) <= shown.step_seconds
    assert best.lower_bound_seconds >= first.least_within(best.peak_bytes) * (1 - 1e-9)
    assert best.lower_bound_seconds <= best.step_seconds


def test_a_memory_limit_that_nothing_fits_needs_no_second_search(searches):
    search(GRAPH, slowed(FAST, 100), PlanOptions.of(memory_limit="1KiB"))
    assert len(searches) == 1


@pytest.mark.parametrize(
    "over, sent, again",
    [(1.1, 0.9, False), (1.3, 0.5, False), (1.3, 0.9, True), (1.6, 0.0, True)],
)
def test_a_plan_far_from_its_bound_or_paced_by_messages_needs_another_search(over, sent, again):
    plan = search(GRAPH, FAST, PlanOptions.of(meshes=[Mesh.parse("dp=8")]))[0]
    weight = plan.parameters[0].name
    message = PlannedTransfer(weight, "", Phase.FORWARD, ("all_gather dp",), 8, sent)
    other = replace(message, value="an activation", seconds=1.0)  # which nothing hides
    made = replace(plan, transfers=(message, other), step_seconds=1.0, lower_bound_seconds=1 / over)
    assert _needs_another(made) is again
