"""The reasons are differences of numbers, so changing a number changes the sentence."""

from dataclasses import replace

import pytest

from shardwright.ir.frontier import Frontier
from shardwright.report.choice import fit, why
from tests.harness import plans

MIB = 2**20


@pytest.mark.parametrize(
    "index, limit_mib, objective, text",
    [
        (0, None, "time", "the fastest of 3 plans on the frontier; no memory limit was given"),
        (0, 400, "time", "the fastest of 3 plans on the frontier that fits 400 MiB per rank"),
        (1, 250, "time", "that fits 250 MiB per rank; 1 faster would need at least 300 MiB"),
        (2, 100, "time", "that fits 100 MiB per rank; 2 faster would need at least 200 MiB"),
        (2, None, "memory", "the smallest of 3 plans on the frontier, 70.0 ms slower than the"),
        (1, 250, "devices", "on the fewest devices that fit, 2: the fastest of 3 plans"),
    ],
)
def test_the_first_reason_is_the_objective(index, limit_mib, objective, text):
    frontier = plans.frontier()
    limit = limit_mib * MIB if limit_mib else None
    assert text in why(frontier[index], frontier, limit, objective)[0]


def test_a_plan_off_the_frontier_says_why_it_is_chosen():
    frontier = plans.frontier()
    (place, *_) = why(plans.simple(ms=110, mib=240), frontier, 250 * MIB)
    assert place == (
        "the fastest plan found that fits 250 MiB per rank; it is not on the frontier, as faster"
        " plans add up to less, but need more"
    )


def test_a_frontier_of_one_has_no_other_to_compare_with():
    frontier = Frontier((plans.simple(),))
    assert why(frontier[0], frontier, None, "memory") == ["the smallest plan there is"]


def test_the_best_baseline_is_compared_part_by_part():
    frontier = plans.frontier()
    assert why(frontier[0], frontier)[1:] == [
        "10.0 ms (11.1 %) faster than data parallel, the best of the baselines: communication"
        " 5.00 ms instead of 15.0 ms; memory 300 MiB instead of 320 MiB; saves 10.0 ms of"
        " all_reduce dp for gradients of layers.*.linear.weight"
    ]


def test_what_does_not_fit_or_breaks_a_constraint_is_not_compared():
    frontier = plans.frontier()
    (_, reason) = why(frontier[0], frontier, 310 * MIB)
    assert reason.startswith(
        "80.0 ms (50.0 %) faster than fully sharded, the best of the baselines"
    )
    assert "compute 74.0 ms instead of 149 ms" in reason
    assert why(frontier[0], replace(frontier, broken={"data parallel": ("cap dp=1",)}))[1] == reason
    (_, reason) = why(frontier[2], frontier, 110 * MIB)
    assert reason == "no baseline fits; fully sharded needs 120 MiB"


def test_the_smallest_plan_is_compared_with_the_smallest_baseline():
    frontier = plans.frontier()
    assert "faster than fully sharded" in why(frontier[2], frontier, None, "memory")[1]


def test_a_slower_plan_says_so_and_what_it_adds():
    frontier = plans.frontier()
    reason = why(frontier[2], frontier)[1]
    assert reason.startswith("60.0 ms (66.7 %) slower than data parallel")
    assert "memory 100 MiB instead of 320 MiB" in reason


def test_a_plan_equal_to_a_baseline_says_so():
    plan = plans.simple()
    frontier = Frontier((plan,), (replace(plan, name="data parallel"),))
    assert why(plan, frontier)[1] == (
        "as fast as data parallel, the best of the baselines, with the same costs"
    )


def test_a_baseline_that_is_chosen_is_named():
    plan = plans.simple("data parallel")
    assert why(plan, Frontier((plan,), (plan,)))[1] == (
        "it is the plan known as data parallel, the best of the baselines"
    )


def test_devices_that_all_do_the_same_are_told_as_such():
    words = "every device computes all of it, so one would be as fast"
    alike = plans.simple(lies="R", comm_ms=0)
    assert fit(alike, None).endswith(words)
    assert words not in fit(plans.simple(), None)
    assert words not in fit(plans.simple(lies="R", weight="S(0)"), None)
