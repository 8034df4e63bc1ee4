"""Plans off the frontier are asked within a limit, by what they need when settled."""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from shardwright.api import search_with as search
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Plan
from shardwright.ir.timeline import Timeline
from shardwright.machine.presets import preset
from shardwright.planner.deadline import Deadline
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.off_frontier import OffFrontierPlans
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from tests.harness.layered_graphs import residual_layers
from tests.harness.plan_simulations import FunctionSimulation
from tests.harness.plans import simple


@dataclass(frozen=True, eq=False)
class Made:
    """A candidate of the search `writer` that adds up to `peak` bytes and needs `needs`."""

    writer: str
    seconds: float
    peak: int
    needs: int
    least: int = 0
    again: bool = False
    mesh: str = ""

    @property
    def kind(self):
        return self.mesh or self.writer

    @property
    def cost(self):
        return self.seconds, self.peak

    def may_fit(self, limit):
        return min(self.peak, self.least) <= limit


def as_it_is(plan, _limit):
    return plan


def as_compared(plan):
    return plan


def seconds_of(plan):
    return plan.step_seconds


def off_frontier(*made, timeline=None):
    """The candidates, and a list of those that are settled, in order."""
    by_seconds = {one.seconds: one for one in made}
    settled = []

    def write(candidate):
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.peak)

    def settle(plan):
        settled.append(plan.step_seconds)
        needs = by_seconds[plan.step_seconds].needs
        return replace(plan, peak_bytes=needs, timeline=timeline)

    return OffFrontierPlans(
        cast(list[Candidate], list(made)), write, seconds_of, settle, as_it_is
    ), settled


A = (Made("a", 1.0, 50, 90), Made("a", 1.2, 40, 72), Made("a", 1.5, 30, 54))
B = (Made("b", 1.1, 80, 85), Made("b", 1.3, 70, 68), Made("b", 1.9, 60, 60))


def test_the_fastest_that_fits_is_found_though_another_adds_up_to_less():
    others, _ = off_frontier(*A, *B)
    found = others.faster(Bytes(70), Seconds(math.inf), 1.0)
    assert found is not None
    assert (found.step_seconds, found.peak_bytes) == (1.3, 68)
    # Nothing on the frontier of what adds up, which is all of `A`, is as fast within 70 bytes.
    assert min(one.seconds for one in A if one.needs <= 70) == 1.5


def test_what_one_plan_of_a_mesh_needs_tells_of_the_others():
    others, settled = off_frontier(*A, *B)
    others.faster(Bytes(70), Seconds(math.inf), 1.0)
    assert settled == [1.0, 1.3]  # 1.2 is likely to need 72, as 1.0 needs 1.8 times what it adds up


def test_plans_that_fit_are_compared_with_their_own_prefetch():
    def deepen(plan, limit):
        deeper = {1.1: 0.9, 1.2: 0.8}[plan.step_seconds]
        return replace(plan, step_seconds=Seconds(deeper), peak_bytes=limit)

    made = cast(list[Candidate], [Made("a", 1.0, 90, 90), Made("b", 1.1, 60, 60)])
    made += cast(list[Candidate], [Made("c", 1.2, 60, 60)])

    def write(candidate):
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.needs)

    def least(plan):
        return {1.0: 1.0, 1.1: 0.9, 1.2: 0.8}[plan.step_seconds]

    others = OffFrontierPlans(made, write, least, lambda plan: plan, deepen)
    found = others.faster(Bytes(70), Seconds(1.15), 0.7)
    assert found is not None
    # That at 1.2 is not looked at: it is no faster than 1.15 by the tables.
    assert (found.step_seconds, found.peak_bytes) == (0.9, 70)


def test_only_plans_that_are_clearly_faster_are_looked_at():
    others, settled = off_frontier(*A, *B)
    assert others.faster(Bytes(70), Seconds(1.005), 1.0) is None
    assert settled == []
    assert others.faster(Bytes(70), Seconds(1.02), 1.0) is None
    assert settled == [1.0]


def test_what_cannot_fit_is_not_settled_and_few_are_at_all():
    state = [Made("c", 1 + i / 100, 90, 90, least=80) for i in range(20)]
    others, settled = off_frontier(*state)
    assert others.faster(Bytes(70), Seconds(math.inf), 0.5) is None
    assert settled == []
    meshes = [Made(str(i), 1 + i / 100, 50, 90) for i in range(30)]
    others, settled = off_frontier(*meshes)
    assert others.faster(Bytes(70), Seconds(math.inf), 1.0) is None
    assert settled == [one.seconds for one in meshes[:24]]
    others, settled = off_frontier(*meshes, timeline=Timeline((), ()))
    assert others.faster(Bytes(70), Seconds(math.inf), 1.0) is None
    assert settled == [one.seconds for one in meshes[:8]], "whole programs take longer"


def test_none_is_tried_after_a_deadline():
    others, settled = off_frontier(*A, *B)
    assert others.faster(Bytes(70), Seconds(math.inf), 1.0, Deadline(0.0, 0.0)) is None
    assert not settled


def test_plans_whose_seconds_are_known_are_written_to_be_simulated_only():
    written = []

    def write(candidate):
        written.append(candidate.seconds)
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.peak)

    meshes = cast(list[Candidate], [Made(str(i), 1 + i, 50, 50) for i in range(20)])
    for adds_up, seconds in ((False, [1 + i for i in range(20)]), (True, [1])):
        others = OffFrontierPlans(
            meshes, write, seconds_of, lambda plan: plan, as_it_is, adds_up=adds_up
        )
        found = others.faster(Bytes(70), Seconds(math.inf), 1.0)
        assert found is not None and found.step_seconds == 1
        assert written == seconds
        written.clear()


def frontier_of(made, others):
    plans = [
        replace(simple(), step_seconds=one.seconds, peak_bytes=one.peak, memory=None)
        for one in made
    ]
    needs = {one.seconds: one.needs for one in made}
    return SearchedFrontier(
        plans,
        simulation=FunctionSimulation(
            lambda plan: replace(plan, peak_bytes=needs[plan.step_seconds])
        ),
        least=lambda place: 0,
        off_frontier=others,
    )


def test_a_frontier_asks_the_others_only_where_its_fastest_does_not_fit():
    asked = []

    def others(limit, than, share, _deadline):
        asked.append((limit, than, share))
        return faster

    faster: Plan | None = None
    front = frontier_of(A, others)
    assert front.fastest(90).step_seconds == 1.0
    assert front.fastest().step_seconds == 1.0
    assert asked == []
    assert front.fastest(60).step_seconds == 1.5
    assert asked == [(60, 1.5, 1.0)]
    with pytest.raises(InfeasibleError, match="the smallest needs"):
        front.fastest(53)
    assert asked[1:] == [(53, math.inf, 1.0)]
    faster = replace(simple(), step_seconds=1.3)
    front = frontier_of(A, others)  # which keeps what it found
    assert front.fastest(60) is faster
    assert front.fastest(53) is faster


@pytest.mark.parametrize("machine", ["8xH100", "4xV100"])
def test_no_mesh_alone_gives_a_clearly_faster_plan_within_a_limit(machine):
    graph, known = residual_layers(3), preset(machine)
    front = search(graph, known)
    alone = [
        search(graph, known, PlanOptions.of(meshes=[mesh]))
        for mesh in {plan.mesh for plan in front}
    ]
    roomy, tight = front.fastest().peak_bytes, front.smallest().peak_bytes
    for part in (0.2, 0.5, 0.8):
        limit = int(tight + part * (roomy - tight))
        plan = front.fastest(limit)
        assert plan.peak_bytes <= limit
        for one in alone:
            try:
                assert plan.step_seconds <= 1.04 * one.fastest(limit).step_seconds
            except InfeasibleError:
                continue


def test_where_a_plan_fits_with_room_faster_ones_of_its_mesh_are_tried():
    made = [Made("d", 1.0, 100, 70), Made("d", 1.2, 80, 56), Made("d", 1.4, 60, 42)]
    others, settled = off_frontier(*made)
    found = others.faster(Bytes(72), Seconds(2.0), 0.9)
    assert found is not None and found.step_seconds == 1.0
    assert settled == [1.2, 1.0]


def test_of_a_second_search_the_last_that_would_be_faster_is_tried_although_unlikely():
    made = [Made("e", 1.0 + i / 10, 100 - 5 * i, 80 - 4 * i) for i in range(5)]
    others, settled = off_frontier(*made)
    assert others.faster(Bytes(70), Seconds(1.35), 0.95) is None
    assert settled == []
    others, settled = off_frontier(*(replace(one, again=True) for one in made))
    found = others.faster(Bytes(70), Seconds(1.35), 0.95)
    assert found is not None and (found.step_seconds, found.peak_bytes) == (1.3, 68)
    assert settled == [1.3]


def test_forms_of_a_graph_on_one_mesh_tell_of_each_other():
    slower = {1.0: 2.0, 1.01: 2.0, 1.2: 1.3}
    settled = []

    def write(candidate):
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.peak)

    def settle(plan):
        settled.append(plan.step_seconds)
        return replace(plan, step_seconds=slower[plan.step_seconds] * plan.step_seconds)

    made = [Made("plain", 1.0, 50, 50, mesh="a"), Made("chunked", 1.01, 50, 50, mesh="a")]
    made.append(Made("other", 1.2, 50, 50, mesh="b"))
    others = OffFrontierPlans(cast(list[Candidate], made), write, seconds_of, settle, as_it_is)
    found = others.faster(Bytes(70), Seconds(1.9), 1.0)
    assert found is not None and found.step_seconds == 1.3 * 1.2
    assert settled == [1.0, 1.2], "the other form on the mesh is likely to take twice as long, too"


def test_a_form_with_memory_for_more_buckets_ahead_is_tried():
    """The plain form has no memory for the buckets that make a step much faster."""
    made = [Made("plain", 1.0, 60, 60, mesh="a"), Made("chunked", 1.01, 40, 40, mesh="a")]

    def write(candidate):
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.peak)

    def compare(plan):
        return replace(plan, step_seconds=2 * plan.step_seconds)

    def deepen(plan, limit):
        fits = limit is None or plan.peak_bytes + 20 <= limit
        return replace(plan, step_seconds=plan.step_seconds * (0.6 if fits else 1))

    def least(plan):
        return 0.6 * 2 * plan.step_seconds

    others = OffFrontierPlans(cast(list[Candidate], made), write, least, compare, deepen)
    found = others.faster(Bytes(70), Seconds(2.1), 1.0)
    assert found is not None and found.step_seconds == 0.6 * 2 * 1.01


def test_plans_that_are_simulated_at_once_are_of_several_meshes():
    class Foresight:
        width, expected = 2, []

        def knows(self, _plan):
            return False

        def knows_seconds(self, plan):
            return plan.step_seconds in self.expected[:1]

        def expect(self, *, seconds=(), deepened=(), limit=None):
            self.expected += [plan.step_seconds for plan in (*seconds, *deepened)]

    made = [Made("plain", 1.0, 50, 50, mesh="a"), Made("chunked", 1.01, 50, 50, mesh="a")]
    made.append(Made("other", 1.2, 50, 50, mesh="b"))

    def write(candidate):
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.peak)

    foresight = cast(Any, Foresight())
    others = OffFrontierPlans(
        cast(list[Candidate], made),
        write,
        seconds_of,
        lambda plan: plan,
        as_it_is,
        foresight=foresight,
    )
    assert others.faster(Bytes(70), Seconds(1.9), 1.0) is not None
    # Their times, and when these are known all about those that may be the fastest.
    assert foresight.expected == [1.0, 1.2, 1.0]


def test_plans_that_are_no_faster_however_far_ahead_they_gather_are_not_compared():
    """Their time with many buckets ahead is simulated alone, and tells of their neighbours."""
    made = [Made(name, seconds, 50, 50, mesh="a") for name, seconds in (("x", 1.0), ("y", 1.1))]
    made.append(Made("z", 1.2, 50, 50, mesh="b"))
    simulated, compared = [], []

    def write(candidate):
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.peak)

    def least(plan):
        simulated.append((plan.step_seconds, plan.ahead))
        return {1.0: 1.9, 1.1: 1.9, 1.2: 1.3}[plan.step_seconds]

    def compare(plan):
        compared.append(plan.step_seconds)
        return replace(plan, step_seconds=least(plan))

    others = OffFrontierPlans(cast(list[Candidate], made), write, least, compare, as_it_is)
    found = others.faster(Bytes(70), Seconds(1.8), 1.0)
    assert found is not None and found.step_seconds == 1.3
    assert compared == [1.2]
    assert simulated[:2] == [(1.0, 8), (1.2, 8)], "1.1 is likely to take 1.9 times as long, too"


def test_what_a_limit_tells_of_a_kind_is_known_within_others():
    simulated = []

    def write(candidate):
        return replace(simple(), step_seconds=candidate.seconds, peak_bytes=candidate.peak)

    def least(plan):
        simulated.append(plan.step_seconds)
        return 1.3 * plan.step_seconds

    made = [Made("x", 1.0, 65, 65, mesh="a"), Made("y", 1.1, 50, 50, mesh="a")]
    others = OffFrontierPlans(cast(list[Candidate], made), write, least, as_compared, as_it_is)
    assert others.faster(Bytes(70), Seconds(1.2), 1.0) is None
    assert simulated == [1.0]
    # 1.1 is likely to take 1.3 seconds then, a tenth more or less.
    assert others.faster(Bytes(60), Seconds(1.25), 1.0) is None
    assert simulated == [1.0]
    assert others.faster(Bytes(60), Seconds(1.4), 1.0) is None
    assert simulated == [1.0, 1.1]
