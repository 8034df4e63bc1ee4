"""Plans are simulated as long as their additive seconds and the stalls of others allow a gain."""

from dataclasses import replace

import pytest

from shardwright.ir.layout import Seconds
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.planner.plans.stalls import Stalls
from tests.harness.plan_simulations import FunctionSimulation
from tests.harness.plans import simple


def made(name, seconds, **changes):
    return replace(simple(), name=name, step_seconds=seconds, memory=None, **changes)


def sending(plan, seconds):
    """`plan` whose messages of parameters take so long."""
    weight = plan.parameters[0].name
    first = replace(plan.transfers[0], value=weight, seconds=Seconds(seconds))
    return replace(plan, transfers=(first,))


def test_messages_are_expected_to_stall_as_those_of_plans_on_the_same_mesh():
    first, second = sending(made("first", 1.0), 0.4), sending(made("second", 1.1), 0.2)
    stalls = Stalls()
    assert stalls.likely_seconds(second) == 1.1
    stalls.learn(first, Seconds(1.2))  # half of the seconds of its messages
    assert stalls.likely_seconds(second) == pytest.approx(1.1 + 0.75 * 0.1)
    stalls.learn(sending(made("third", 1.1), 0.4), Seconds(1.2))
    assert stalls.likely_seconds(second) == pytest.approx(1.1 + 0.75 * 0.05)
    stalls.learn(first, Seconds(0.9))
    assert stalls.likely_seconds(second) == 1.1, "never less than the additive seconds"


def test_nothing_is_expected_of_plans_in_other_numbers_of_micro_batches():
    stalls = Stalls()
    stalls.learn(sending(made("first", 1.0), 0.4), Seconds(1.2))
    other = sending(made("other", 1.1, micro_batches=2), 0.4)
    assert stalls.likely_seconds(other) == 1.1


def test_plans_without_messages_of_parameters_teach_nothing():
    stalls = Stalls()
    stalls.learn(replace(made("first", 1.0), transfers=()), Seconds(2.0))
    assert stalls.likely_seconds(sending(made("second", 1.1), 0.4)) == 1.1


def test_a_frontier_simulates_no_plans_that_would_stall_too_long():
    """All stall by 0.4 s; the last one of the first few could not be faster than the first."""
    first = sending(made("first", 1.0, peak_bytes=90), 0.4)
    others = [
        sending(made(f"{seconds}", seconds, peak_bytes=90 - n), 0.4)
        for n, seconds in enumerate((1.01, 1.05, 1.15, 1.2), 1)
    ]
    asked = []

    def seconds(plan):
        asked.append(plan.name)
        return plan.step_seconds + 0.4

    def compare(plan):
        return replace(plan, step_seconds=plan.step_seconds + 0.4)

    simulation = FunctionSimulation(compare, seconds=seconds)
    found = SearchedFrontier((first, *others), simulation=simulation)
    assert found.fastest("unlimited").name == "first"
    assert asked == ["1.01", "1.05"]
