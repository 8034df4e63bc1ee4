"""The step that faster links would give is that of the same strategy on a machine that has them."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.planner.audit.avoidable import avoidable
from shardwright.planner.audit.faster_links import FASTER, faster_links
from shardwright.report.answer import answer_lines
from shardwright.rules.analysis import analyze
from tests.harness.layered_graphs import residual_layers
from tests.harness.small_graphs import mixtral

GRAPH = residual_layers(2)
ANALYSIS = analyze(GRAPH)


def with_links(factor, kind="2x2xH100"):
    """A machine whose outermost links have this part of their bandwidth."""
    machine = sw.Machine.preset(kind)
    *inner, outer = machine.levels
    slower = replace(outer, bytes_per_s=factor * outer.bytes_per_s)
    return replace(machine, name=f"slow {kind}", levels=(*inner, slower))


@pytest.mark.parametrize("kind", ["2xH100", "2x2xH100"])
def test_the_step_is_that_of_a_machine_with_faster_links(kind):
    machine = with_links(0.02, kind)
    plan = sw.price(GRAPH, machine, f"dp_replicate={machine.devices}")
    found = faster_links(plan, GRAPH, ANALYSIS, machine)
    assert found is not None and found.level == machine.levels[-1].name
    faster = sw.price(GRAPH, with_links(0.02 * FASTER, kind), plan.name)
    assert found.seconds == pytest.approx(faster.step_seconds, rel=1e-9)
    helps = dict(answer_lines(plan, [], None, avoidable(plan, GRAPH, machine)))
    assert f"2 times the bandwidth of the {found.level}" in helps["would help"]


def test_messages_of_experts_are_faster_too():
    """They are within operators, whose seconds the plan states."""
    graph = mixtral(layers=2)
    machine, text = with_links(0.002), "dp_shard=4 ep=4"
    plan = sw.price(graph, machine, text)
    assert any("all_to_all" in one for t in plan.transfers for one in t.collectives)
    found = faster_links(plan, graph, analyze(graph), machine)
    faster = sw.price(graph, with_links(0.002 * FASTER), text)
    assert found is not None
    assert found.seconds == pytest.approx(faster.step_seconds, rel=1e-9)


def test_links_that_nothing_waits_for_are_not_named():
    machine = with_links(100.0)
    plan = sw.price(GRAPH, machine, "dp_replicate=4")
    assert faster_links(plan, GRAPH, ANALYSIS, machine) is None
    alone = sw.price(GRAPH, "1xH100", "dp_replicate=1")
    assert faster_links(alone, GRAPH, ANALYSIS, sw.Machine.preset("1xH100")) is None


def test_stages_also_wait_for_each_other():
    machine = with_links(0.02)
    plan = sw.price(GRAPH, machine, "dp_replicate=2 pp=2 mb=2")
    assert faster_links(plan, GRAPH, ANALYSIS, machine) is None
