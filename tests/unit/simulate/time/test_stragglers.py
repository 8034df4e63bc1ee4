from dataclasses import replace
from datetime import UTC, datetime
from math import exp

import numpy as np
import pytest

from shardwright.machine.measurement import Measured
from shardwright.machine.presets import preset
from shardwright.planner.tables.mesh_invariants import MeshInvariants
from shardwright.simulate.costs.compute import operator_seconds
from shardwright.simulate.time.stragglers import at_a_wait, late, skewed, stretch
from tests.harness.plans import MS
from tests.harness.small_graphs import linear_layer, toy_machine

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


def test_a_wait_costs_by_what_was_computed_since_ranks_were_together():
    assert at_a_wait(LATE, 10 * MS, 0.0) == pytest.approx((1 * MS, 0.0))
    assert at_a_wait(LATE, 2.5 * MS, 0.0) == pytest.approx((0.5 * MS, 0.0))
    assert at_a_wait(LATE, 0.0, 0.0) == (0.0, 0.0)


def test_what_is_sent_ahead_is_waited_for_by_so_much_less():
    """A copy that was sent 1 ms of computing before finds ranks apart by what is left."""
    lost, since = at_a_wait(LATE, 10 * MS, 1 * MS)
    apart = 0.9**0.5 * MS
    assert lost == pytest.approx(apart * exp(-1 * MS / (2 * apart)))
    assert since > 1 * MS  # ranks are still apart
    # When it was sent nothing had been computed, so nobody is late.
    assert at_a_wait(LATE, 1 * MS, 1 * MS) == (0.0, 1 * MS)


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
