from dataclasses import replace
from datetime import UTC, datetime
from math import exp

import numpy as np
import pytest

from shardwright.machine.measurement import Measured
from shardwright.machine.presets import preset
from shardwright.planner.tables.mesh_invariants import MeshInvariants
from shardwright.simulate.costs.compute import operator_seconds
from shardwright.simulate.time.stragglers import late, skewed, stretch, with_whole_waits
from tests.harness.plans import MS, moved
from tests.harness.small_graphs import linear_layer, toy_machine
from tests.unit.simulate.time.test_step import layers, sharded

APART = replace(toy_machine(), arrival_skew_seconds=0.5)
MEASURED = Measured(datetime(2026, 1, 31, tzinfo=UTC), 0.0, ())
SETTLED = replace(APART, measured=MEASURED)
# Ranks that have computed for 10 ms are 1 ms apart; of every launch 0.1 ms are for that.
LATE = replace(SETTLED, arrival_skew_seconds=1 * MS, charged_skew_seconds=0.1 * MS)


def test_a_wait_costs_more_by_the_root_of_what_is_computed_before_it():
    assert skewed(APART, lambda: 10e-3, 1).collective_launch_seconds == 2.0 + 0.5
    assert skewed(APART, lambda: 40e-3, 1).collective_launch_seconds == 2.0 + 1.0
    assert skewed(APART, lambda: 40e-3, 4).collective_launch_seconds == 2.0 + 0.5
    once = skewed(APART, lambda: 10e-3, 1)
    assert once.charged_skew_seconds == 0.5
    assert skewed(once, lambda: 10e-3, 1) == once  # and only once
    slowly = replace(APART, arrival_skew_power=1.0)
    assert skewed(slowly, lambda: 40e-3, 1).collective_launch_seconds == 2.0 + 2.0


def test_where_plans_are_settled_a_wait_costs_what_one_more_does():
    """By the derivative of n waits in the same time, n (t / n)^power."""
    for power in (0.5, 0.75, 1.0):
        machine = replace(SETTLED, arrival_skew_power=power)
        step, n, a_bit = 0.3, 30, 1e-6
        whole = [m * late(machine, step / m) for m in (n, n + a_bit)]
        found = skewed(machine, lambda between=step / n: between, 1)
        assert found.charged_skew_seconds == pytest.approx((whole[1] - whole[0]) / a_bit, abs=1e-6)
        both = skewed(machine, lambda: 10e-3, 1, whole=True)
        assert both.charged_skew_seconds == 0.5


def waiting(plan, machine=LATE):
    """What transfers of a plan take longer by, in ms, in their order."""
    found = with_whole_waits(plan, machine)
    more = [b.seconds - a.seconds for a, b in zip(plan.transfers, found.transfers, strict=True)]
    assert found.step_seconds == pytest.approx(plan.step_seconds + sum(more))
    return [one / MS for one in more]


def blocking(*consumers, phase="forward", what="all_reduce dp"):
    """Three layers of 3 ms without sums of gradients; some wait for what they read."""
    plan = layers()
    brought = tuple(moved(f"to {n}", n, phase, what, 1.0, 1.0) for n in consumers)
    parts = (*plan.ops, *brought, *plan.parameters)
    return replace(plan, transfers=brought, step_seconds=sum(part.seconds for part in parts))


def test_sums_of_gradients_are_waited_for_after_a_whole_step():
    # The sum that is sent last finds ranks apart by all that was computed: 9 ms and the update's.
    assert waiting(layers()) == pytest.approx([1.05**0.5 - 0.1, 0, 0])
    slowly = replace(LATE, arrival_skew_power=1.0)
    assert waiting(layers(), slowly) == pytest.approx([1.05 - 0.1, 0, 0])


def test_a_wait_costs_by_what_was_computed_since_the_one_before():
    # 1.5 ms of the last step's update come before the first.
    found = waiting(blocking("first", "second", "third"))
    assert found == pytest.approx([0.15**0.5 - 0.1, 0.1**0.5 - 0.1, 0.1**0.5 - 0.1])
    back = waiting(blocking("second", phase="backward"))
    assert back == pytest.approx([(0.15 + 0.3 + 0.4) ** 0.5 - 0.1])


def test_ranks_that_have_just_met_do_not_wait_again():
    assert waiting(blocking("second", "second")) == pytest.approx([0, 0.25**0.5 - 0.1])
    assert waiting(blocking("first"), replace(LATE, charged_skew_seconds=1 * MS)) == [0]


def test_who_keeps_a_tile_waits_for_nobody():
    assert waiting(blocking("second", what="slice dp")) == [0]


def test_what_is_sent_ahead_is_waited_for_by_so_much_less():
    """A copy that was sent a millisecond of computing before finds ranks apart by what is left."""
    machine = replace(LATE, charged_skew_seconds=0.0)
    plan = sharded(again=False)
    first, _, second, _, third, _ = waiting(plan, machine)
    assert first == pytest.approx(0.15**0.5)  # waited for at once, after the update
    # All met then; when the second copy is sent nothing has been computed, so nobody is late.
    assert second == 0
    assert 0 < third < 0.1**0.5 * exp(-1 / (2 * 0.1**0.5)) * 1.01


def test_without_skew_plans_are_as_they_were():
    plan = layers()
    assert with_whole_waits(plan, toy_machine()) is plan


def test_where_ranks_are_not_apart_nothing_is_asked():
    assert skewed(toy_machine(), pytest.fail, 1) == toy_machine()


def test_a_stretch_is_a_pass_of_a_contraction_and_what_goes_with_it():
    graph, analysis = linear_layer()
    machine = toy_machine()
    costs = MeshInvariants(graph, analysis, machine)
    works = [costs.workload(op) for op in graph.ops]
    wholes = [np.array(work.sizes)[:, None] for work in works]
    each = [operator_seconds(*one, machine.device) for one in zip(works, wholes, strict=True)]
    total = float(sum(each)[0])
    assert stretch(graph, analysis, machine) == pytest.approx(total / 2)


def test_a_graph_without_contractions_is_one_stretch():
    graph, analysis = linear_layer()
    only = replace(graph, ops=graph.ops[1:])
    assert stretch(only, analysis, preset("2xcpu")) > 0
