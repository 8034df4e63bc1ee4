"""What is shown beside a chosen plan is simulated, with as many buckets ahead as it has."""

from dataclasses import replace

from shardwright.ir.layout import Mesh
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.report.answer import alternatives
from shardwright.report.other_plans import other_plans
from tests.harness.plan_simulations import FunctionSimulation
from tests.harness.plans import simple

LIMIT = 100
COSTS = [(0.5, 300), (1.0, 200), (1.2, 120), (1.5, 90), (1.6, 60), (1.8, 20), (9.0, 5)]


def frontier(more=5, costs=COSTS):
    """Simulated steps take a second longer, and half of that with buckets ahead."""
    plans = [
        replace(simple(), name=f"plan {i}", step_seconds=time, peak_bytes=peak, memory=None)
        for i, (time, peak) in enumerate(costs)
    ]

    def compare(plan):
        wait, buckets = (1.0, 0) if plan.ahead == 1 else (0.5, more)
        time, peak = plan.step_seconds + wait, plan.peak_bytes + buckets
        return replace(plan, step_seconds=time, peak_bytes=peak)

    return SearchedFrontier(plans, simulation=FunctionSimulation(compare))


def chosen(found, index, ahead):
    return found.compared(replace(found.plans[index], ahead=ahead))


def names(plans):
    return [one.name for one in plans.values()]


def test_plans_that_fit_and_those_that_need_more_are_simulated():
    found = frontier()
    plan = chosen(found, 3, 4)
    others = other_plans(plan, found, LIMIT)
    assert names(others.fitting) == ["plan 4", "plan 5"], "that of 9 s takes too long"
    assert names(others.larger) == ["plan 1", "plan 2"], "that of 300 bytes is too large"
    assert others.fitting[4].step_seconds == 2.1 and others.fitting[4].ahead == 4
    assert others.larger[2].step_seconds == 1.7
    rivals = found.with_rivals(plan, others.simulated).rivals
    known = {one.step_seconds: one.is_simulated for one in rivals}
    assert known == {0.5: False, 1.5: True, 1.7: True, 2.1: True, 2.3: True, 9.0: False}


def test_a_plan_without_memory_for_buckets_ahead_is_shown_without():
    found = frontier(more=50)
    others = other_plans(chosen(found, 5, 4), found, LIMIT)
    assert others.fitting[4].ahead == 1 and others.fitting[4].step_seconds == 2.6


def test_more_are_simulated_only_if_some_are_no_alternatives():
    costs = [(1 + 0.09 * i, 90 - 5 * i) for i in range(12)]
    found = frontier(costs=costs, more=0)
    first = other_plans(chosen(found, 0, 1), found, LIMIT)
    assert len(first.fitting) == 5 and names(first.fitting)[-1] == "plan 11"
    alike = [costs[0], (1.09, 89.5), *costs[2:]]  # plan 1 saves nothing
    found = frontier(costs=alike, more=0)
    plan = chosen(found, 0, 1)
    others = other_plans(plan, found, LIMIT)
    assert len(others.fitting) == 7 and len(others.offered(plan)) == 6


def test_without_a_limit_all_plans_fit():
    found = frontier()
    others = other_plans(chosen(found, 0, 1), found, None)
    assert not others.larger and names(others.fitting)[0] == "plan 1"


def test_rows_have_simulated_figures_and_never_those_of_the_chosen_plan():
    found = frontier()
    plan = chosen(found, 3, 1)
    others = other_plans(plan, found, LIMIT)
    twin = replace(others, fitting={**others.fitting, 9: replace(plan, name="twin")})
    heading, *rows = alternatives(plan, twin, 7)
    assert heading.startswith("others that fit:  (5 more")
    assert [row.split()[0] for row in rows] == ["2600", "2800"]


def test_plans_are_expected_to_take_as_much_longer_as_the_chosen_one():
    """The chosen plan takes 2.5 s instead of 1.5: others may be slower than by their tables."""
    costs = [(1.45, 120), (1.49, 110), (1.5, 90), (2.9, 60), (3.1, 20)]
    found = frontier(costs=costs)
    others = other_plans(chosen(found, 2, 1), found, LIMIT)
    assert names(others.fitting) == ["plan 3"], "3.1 s would be more than twice as long"
    assert names(others.larger) == ["plan 0"], "1.49 s would save less than a hundredth"


def test_the_first_plan_on_a_mesh_tells_which_others_are_too_slow():
    costs = [(1.0, 90), (1.5, 60), (1.8, 40), (3.5, 20)]
    found = frontier(costs=costs)
    meshes = [("dp", 2), ("tp", 3), ("tp", 3), ("dp", 2)]
    plans = [
        replace(one, mesh=Mesh((mesh,))) for one, mesh in zip(found.plans, meshes, strict=True)
    ]
    compared = []

    def compare(plan):
        compared.append(plan.name)
        longer = 1.5 if plan.mesh.shape == (3,) else 0.1
        return replace(plan, step_seconds=plan.step_seconds * (1 + longer))

    found = SearchedFrontier(plans, simulation=FunctionSimulation(compare))
    others = other_plans(chosen(found, 0, 1), found, LIMIT)
    assert names(others.fitting) == ["plan 1"], "plan 2 is likely to take 4.5 s, plan 3 3.85 s"
    assert compared == ["plan 0", "plan 1"]


def test_more_micro_batches_are_not_tried_where_less_are_too_slow():
    costs = [(1.0, 90), (1.2, 80), (1.4, 60), (1.5, 40), (1.6, 20)]
    counts, meshes = (1, 1, 2, 2, 4), (2, 2, 2, 3, 4)
    plans = [
        replace(one, mesh=Mesh((("dp", size),)), micro_batches=count)
        for one, count, size in zip(frontier(costs=costs).plans, counts, meshes, strict=True)
    ]
    compared = []

    def compare(plan):
        compared.append(plan.name)
        return replace(plan, step_seconds=plan.step_seconds * plan.micro_batches**2)

    found = SearchedFrontier(plans, simulation=FunctionSimulation(compare))
    others = other_plans(chosen(found, 0, 1), found, LIMIT)
    assert names(others.fitting) == ["plan 1", "plan 2", "plan 3"]
    assert "plan 4" not in compared, "5.6 and 6 s with two micro-batches are too long already"


def test_plans_in_as_many_micro_batches_as_the_chosen_one_are_tried():
    costs = [(1.0, 90), (1.1, 80), (1.2, 60)]
    plans = [
        replace(one, mesh=Mesh((("dp", size),)), micro_batches=count)
        for one, count, size in zip(frontier(costs=costs).plans, (4, 1, 4), (2, 3, 2), strict=True)
    ]

    def compare(plan):
        return replace(plan, step_seconds=plan.step_seconds * (3 if plan.mesh.size == 3 else 1))

    found = SearchedFrontier(plans, simulation=FunctionSimulation(compare))
    others = other_plans(chosen(found, 0, 1), found, LIMIT)
    assert "plan 2" in names(others.fitting), "that in one micro-batch takes too long"
