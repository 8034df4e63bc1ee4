"""Baselines are simulated only as far as they may be chosen."""

from dataclasses import replace

import pytest

from shardwright.ir.frontier import InfeasibleError, Plans
from shardwright.ir.layout import Bytes, Seconds
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from tests.harness.plan_simulations import FunctionSimulation
from tests.harness.plans import simple


def made(name, seconds, peak):
    return replace(simple(), name=name, step_seconds=seconds, peak_bytes=peak, memory=None)


PLAN = made("searched", 1.0, 90)
BASELINES = {  # additive seconds, their bound, simulated seconds, simulated bytes
    "slow": (1.05, 1.01, 1.04, 10),
    "large and fast": (1.01, 0.5, 0.90, 100),
    "fast": (1.02, 0.6, 0.95, 50),
    "a little faster": (1.03, 0.6, 0.97, 50),
    "equal": (1.0, 0.9, 1.0, 50),
    "far": (1.2, 0.1, 0.1, 10),
    "surely too large": (1.0, 0.1, 0.2, 100),
}


def frontier(**changes):
    """The frontier, the names whose time was simulated, and those with memory, in order."""
    timed, compared = [], []

    def seconds(plan):
        timed.append(plan.name)
        return BASELINES[plan.name][2]

    def compare(plan):
        compared.append(plan.name)
        if plan is PLAN:
            return plan
        _, _, time, peak = BASELINES[plan.name]
        return replace(plan, step_seconds=time, peak_bytes=peak)

    simulation = FunctionSimulation(
        compare, seconds=seconds, least=lambda plan: BASELINES.get(plan.name, (0.0, 0.0))[1]
    )
    given = {
        "baselines": tuple(made(name, one[0], one[3]) for name, one in BASELINES.items()),
        "simulation": simulation,
        "least": lambda index: 0,
        "least_of_baseline": lambda index: 99 if index == len(BASELINES) - 1 else 0,
        **changes,
    }
    return SearchedFrontier((PLAN,), **given), timed, compared


def test_only_baselines_that_may_be_chosen_are_built():
    plans = [made(name, one[0], one[3]) for name, one in BASELINES.items()]
    costs = [(plan.step_seconds, plan.peak_bytes) for plan in plans]
    known = Plans(costs, lambda index: plans[index], list(BASELINES))
    found, _, _ = frontier(baselines=known)
    chosen = found.fastest(95)
    rivals = {rival.name for rival in found.with_rivals(chosen).rivals}
    assert rivals == {"", *BASELINES} - {"fast"}
    assert {*BASELINES} - {plan.name for _, plan in known.written} == {"far", "surely too large"}


def test_memory_is_simulated_of_faster_baselines_until_one_fits():
    found, timed, compared = frontier()
    assert found.fastest(95).name == "fast"
    assert timed == ["large and fast", "fast", "a little faster", "equal"]
    assert list(dict.fromkeys(compared)) == ["searched", "large and fast", "fast"]


def test_the_choice_is_the_same_without_bounds():
    found, _, _ = frontier(least_of_baseline=None)
    assert found.fastest(95).name == "fast"
    found.simulation.least_seconds = lambda plan: Seconds(0.0)
    assert replace(found, chosen={}).fastest(95).name == "fast"


def test_without_a_limit_the_fastest_baseline_is_chosen():
    found, _, compared = frontier()
    assert found.fastest("unlimited").name == "surely too large"
    assert set(compared) == {"searched", "surely too large"}


def test_a_baseline_that_fits_is_chosen_where_no_plan_of_the_frontier_does():
    found, _, _ = frontier(off_frontier=None)
    assert found.fastest(60).name == "far"  # of 10 bytes, and the fastest of those
    with pytest.raises(InfeasibleError):
        found.fastest(5)
    alone, _, _ = frontier(chooses_baselines=False)
    with pytest.raises(InfeasibleError):
        alone.fastest(60)


def test_plans_are_compared_with_the_buckets_ahead_that_fit():
    """The faster plan has no memory for another bucket, with which the next one is faster."""
    first, second = made("first", 1.0, 90), made("second", 1.1, 60)
    steps = {("first", 1): 1.5, ("first", 8): 1.2, ("second", 1): 1.6, ("second", 8): 1.3}

    def compare(plan):
        more = 0 if plan.ahead == 1 else 20
        time, peak = steps[plan.name, plan.ahead], plan.peak_bytes + more
        return replace(plan, step_seconds=time, peak_bytes=peak)

    def deepen(plan, limit):
        known = {"first": first, "second": second}[plan.name]
        deeper = compare(replace(known, ahead=8))
        return deeper if limit is None or deeper.peak_bytes <= limit else plan

    simulation = FunctionSimulation(compare, peak=lambda plan: plan.peak_bytes, deepen=deepen)
    found = SearchedFrontier((first, second), simulation=simulation)
    chosen = found.fastest(95)
    assert (chosen.name, chosen.ahead, chosen.peak_bytes) == ("second", 8, 80)
    assert found.fastest("unlimited").name == "first"
    assert found.fastest(95) is chosen, "what was found is kept"


@pytest.mark.parametrize("other", [1.2, 1.6])
def test_slower_plans_are_simulated_where_those_off_the_frontier_leave_a_gain(other):
    """Additive and simulated seconds of plans; the first one is too large."""
    steps = {0.9: 0.9, 1.0: 2.0, 1.3: 1.5}
    timed = []

    def compare(plan):
        return replace(plan, step_seconds=steps.get(plan.step_seconds, plan.step_seconds))

    def seconds(plan):
        timed.append(plan.step_seconds)
        return steps[plan.step_seconds]

    plans = [made("searched", time, 100 - place) for place, time in enumerate(steps)]
    plans[2] = replace(plans[2], micro_batches=2)  # of which the others do not tell
    found = SearchedFrontier(
        plans,
        simulation=FunctionSimulation(compare, seconds=seconds),
        least=lambda index: 0,
        off_frontier=lambda limit, than, share, deadline: made("searched", other, 90),
    )
    assert found.fastest(99).step_seconds == min(other, 1.5)
    assert timed == ([] if other == 1.2 else [1.3])


def test_a_bounded_search_simulates_only_plans_that_may_be_fast_enough():
    """Slower plans, and those that are far too large, are not asked for their memory."""
    asked = []

    def peak(plan):
        asked.append(plan.name)
        return plan.peak_bytes

    plans = [made("large", 1.0, 300), made("fits", 2.0, 80), made("slow", 3.0, 40)]
    simulation = FunctionSimulation(peak=peak)
    listed = SearchedFrontier(plans, simulation=simulation, least=lambda _: 0)
    assert listed.fastest_within(Bytes(60), Seconds(2.5)) is None
    assert asked == ["fits"]
    found = listed.fastest_within(Bytes(60), Seconds(3.5))
    assert found is not None and found.name == "slow"
    # What is faster than its bound is the fastest of all.
    asked.clear()
    assert listed.fastest_compared(60) is found and not asked
