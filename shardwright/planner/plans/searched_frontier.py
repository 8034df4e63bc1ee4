"""A frontier of additive costs whose plans are simulated on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Self

from shardwright.ir.frontier import (
    ANY_TIME,
    MOST_SETTLED,
    Frontier,
    costs_of,
    names_of,
    undominated,
)
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.machine.model import NO_TIME
from shardwright.planner.deadline import NEVER, Deadline
from shardwright.planner.plans.far_ahead import far_ahead
from shardwright.planner.plans.plan_simulation import PlanSimulation
from shardwright.planner.plans.stalls import Stalls
from shardwright.planner.processes.foresight import Foresight

_GAIN = 1e-2  # the relative gain in time for which a pipeline is preferred
_MOST_TRIED = 16  # plans that are simulated because their additive time permits a gain
_MOST_WHOLE = 3  # of those that no few layers stand for, whose simulation takes long
LEAST_SHARE = 0.75  # of additive memory: simulated memory of baselines was never found below
_LEAST_OF_ALL = 0.4  # the same of plans that keep or recompute parts of layers
_NEAR_TIE = 1.1  # baselines within this multiple of a plan's additive time are simulated

OffFrontier = Callable[[Bytes, Seconds, float, Deadline], Plan | None]


def _none_known(_peak: Bytes) -> float:
    """No bound but zero."""
    return 0.0


@dataclass(frozen=True)
class SearchedFrontier(Frontier):
    """The frontier that a search returns.

    The search adds costs up, so it models neither buckets, nor overlap of communication with
    computation, nor which tensors are alive at the same time. A plan that is shown is *settled*:
    its step program is simulated.

    * `simulation`: simulates plans; None if they are settled already;
    * `least`: a lower bound in bytes of the simulated memory of the plan at an index;
    * `least_of_baseline`: the same of the baseline at an index;
    * `off_frontier`: `(limit, seconds, share, deadline)` -> a plan faster than `seconds` whose
      simulated memory fits into `limit`, among those that are dominated in additive memory only.
      `share` is the smallest ratio of simulated to additive memory seen so far;
    * `pipelines`: a few plans with stages and their additive costs, which are compared with the
      plan that is chosen of the others;
    * `least_within`: bytes -> a lower bound of the seconds of all plans within that memory;
    * `foresight`: simulates plans in several processes before they are compared; None does not;
    * `is_cut`: whether the time limit has ended the search;
    * `deadline`: when no more plans are compared, but that which is chosen;
    * `chooses_baselines`: whether a baseline may be chosen. A method that makes one plan only
      shows them;
    * `chosen`: the fastest plans found so far, by memory limit and by the seconds below which plans
      are compared; copies of a frontier share them.
    """

    simulation: PlanSimulation | None = field(default=None, compare=False, repr=False)
    least: Callable[[int], int] | None = field(default=None, compare=False, repr=False)
    least_of_baseline: Callable[[int], int] | None = field(default=None, compare=False, repr=False)
    off_frontier: OffFrontier | None = field(default=None, compare=False, repr=False)
    pipelines: Sequence[Plan] = field(default=(), compare=False, repr=False)
    least_within: Callable[[Bytes], float] = field(default=_none_known, compare=False, repr=False)
    foresight: Foresight | None = field(default=None, compare=False, repr=False)
    is_cut: bool = False
    deadline: Deadline = field(default=NEVER, compare=False, repr=False)
    chooses_baselines: bool = True
    chosen: dict[tuple[Bytes | None, Seconds], Plan | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def is_settled(self) -> bool:
        """Whether the time and memory of the plans are simulated already."""
        return self.simulation is None

    @property
    def is_late(self) -> bool:
        """Whether the time limit of the search is over, so that no more plans are compared."""
        return self.deadline.is_over

    @property
    def ended_early(self) -> bool:
        """Whether the time limit has ended the search, or ends the comparison of its plans."""
        return self.is_cut or self.is_late

    def without_deadline(self) -> Self:
        """The same frontier, whose plans are compared whenever one is asked for."""
        return replace(self, deadline=NEVER, chosen={} if self.is_late else self.chosen)

    def settled(self, plan: Plan) -> Plan:
        """A plan with time and memory of its step, simulated from the programs of its ranks.

        Args:
            plan: one of these plans, or of the baselines.
        """
        return plan if self.simulation is None else self.simulation.settled(plan)

    def deepened(self, plan: Plan, limit: Bytes | None) -> Plan:
        """A compared plan that gathers more parameters ahead, where it is faster within `limit`."""
        return plan if self.simulation is None else self.simulation.deepened(plan, limit)

    def compared(self, plan: Plan) -> Plan:
        """The time and peak that `settled` finds, from few of the layers where that is exact."""
        return plan if self.simulation is None else self.simulation.compared(plan)

    def expect(self, plans: Sequence[Plan]) -> None:
        """Simulate at once what `compared` will find of these plans, in several processes."""
        if self.foresight is not None:
            self.foresight.expect(compared=plans)

    def expect_deepened(self, plans: Iterable[Plan], limit: Bytes | None) -> None:
        """Simulate at once what `deepened` will find of the first few of these plans."""
        if self.foresight is not None and self.foresight.width > 1:
            few = islice(plans, self.foresight.width)
            self.foresight.expect(deepened=list(few), limit=limit)

    def simulated_peak(self, plan: Plan) -> Bytes:
        """The peak that `settled` finds, without its time."""
        return plan.peak_bytes if self.simulation is None else self.simulation.peak(plan)

    def reserved(self, plan: Plan) -> Bytes:
        """Bytes that torch's allocator reserves of a compared plan, without libraries."""
        return super().reserved(plan) if self.simulation is None else self.simulation.reserved(plan)

    def simulated_seconds(self, plan: Plan) -> Seconds:
        """The step time that `settled` finds, without its memory."""
        return plan.step_seconds if self.simulation is None else self.simulation.seconds(plan)

    def _least_seconds(self, plan: Plan) -> Seconds:
        """A lower bound of that time."""
        return NO_TIME if self.simulation is None else self.simulation.least_seconds(plan)

    def all_settled(self, most: int = MOST_SETTLED) -> SearchedFrontier:
        """The frontier of simulated time and memory.

        Simulation takes a quarter of a second to a second for a plan of a large model.

        Args:
            most: the largest number of plans to simulate; of a longer frontier, evenly spaced plans
                with both ends.

        Returns:
            The plans that no other of them dominates, and the baselines. Those with stages have no
            timeline. After the deadline only both ends are simulated, which then have none, either.
        """
        if self.simulation is None:
            return self
        last = len(self.plans) - 1
        indices: Sequence[int] = range(last + 1)
        if last >= most:
            indices = sorted({round(i * last / (most - 1)) for i in range(most)})
        kept = [self._shown(plan) for plan in undominated(self._compared_in_time(indices))]
        known = () if self.is_late else tuple(map(self._shown, self.baselines))
        return replace(
            self,
            plans=tuple(kept),
            baselines=known,
            simulation=None,
            least=None,
            least_of_baseline=None,
            pipelines=(),
            foresight=None,
            deadline=NEVER,
            is_cut=self.ended_early,
            chosen={},
        )

    def _compared_in_time(self, indices: Sequence[int]) -> list[Plan]:
        """The compared plans at `indices`, both ends first; no more after the deadline."""
        order, width = list(indices), len(indices)
        if self.deadline != NEVER:
            order = list(dict.fromkeys((indices[0], indices[-1], *indices)))
            width = 2 if self.foresight is None else max(2, self.foresight.width)
        found: list[Plan] = []
        for place in range(0, len(order), width):
            if found and self.is_late:
                break
            plans = [self.plans[index] for index in order[place : place + width]]
            self.expect(plans)
            found += map(self.compared, plans)
        return found

    def _shown(self, plan: Plan) -> Plan:
        """A plan of many: one whose whole program would take too long is only compared."""
        return self.compared(plan) if plan.stages > 1 or self.is_late else self.settled(plan)

    def _fastest_fitting(self, limit: Bytes, most: Seconds = ANY_TIME) -> Plan | None:
        """The fastest plan found whose settled memory fits into `limit`; None if there is none.

        A simulation takes up to a second, so few plans are simulated: none that take `most` or
        longer by their bounds.
        """
        if (limit, most) not in self.chosen:
            found = self.chosen[limit, most] = self._found_fitting(limit, most)
            if found is not None and found.step_seconds < most:
                self.chosen[limit, ANY_TIME] = found
        return self.chosen[limit, most]

    def _found_fitting(self, limit: Bytes, most: Seconds) -> Plan | None:
        index, share = self._fastest_listed(limit, most)
        found = None if index is None else self._first(index, limit)
        seconds = self.costs[index][0] if index is not None else ANY_TIME
        found = self._best_of_baselines(found, seconds, limit, most)
        if self.off_frontier is not None and seconds > self.costs[0][0]:
            than = min(seconds if found is None else found.step_seconds, most)
            other = self.off_frontier(limit, than, min(share, 1.0), self.deadline)
            if other is not None and (found is None or other.step_seconds < found.step_seconds):
                found = other
        if index is not None and found is not None:
            found = self._best_behind(index, found, limit, most)
        return self._or_pipeline(found, limit, most)

    def _fastest_of_all(self) -> Plan:
        """The fastest plan, without a memory limit."""
        key = None, ANY_TIME
        if key not in self.chosen:
            found = self._best_of_baselines(self._first(0, None), self.costs[0][0], None)
            assert found is not None
            self.chosen[key] = self._or_pipeline(self._best_behind(0, found, None), None)
        best = self.chosen[key]
        assert best is not None
        return best

    def _first(self, index: int, limit: Bytes | None) -> Plan:
        """The plan at `index`, with as many buckets ahead as make it faster.

        Baselines that may be faster are simulated at once.
        """
        plan = self.compared(self.plans[index])
        if self.foresight is not None and self.foresight.width > 1 and self.chooses_baselines:
            near = self._near(Seconds(_NEAR_TIE * self.costs[index][0]), limit)
            likely = (one for one in near if self._least_seconds(one) < plan.step_seconds)
            few = [far_ahead(one, plan) for one in islice(likely, self.foresight.width - 1)]
            self.foresight.expect(deepened=[self.plans[index]], seconds=few, limit=limit)
        return self.deepened(plan, limit)

    def _best_behind(
        self, first: int, best: Plan, limit: Bytes | None, most: Seconds = ANY_TIME
    ) -> Plan:
        """The fastest of `best` and the plans that are slower than that at `first`, simulated.

        Operators hide messages only in part, so the order of additive times is not that of steps.
        Plans that take `most` seconds or longer are not compared.
        """
        one, stalls = self._first(first, limit), Stalls()
        tries = _MOST_TRIED if one.timeline is None else _MOST_WHOLE
        end = min(first + tries, len(self.plans))
        stalls.learn(self.plans[first], one.step_seconds)
        than = min(best.step_seconds, most)
        for index in range(first + 1, end):
            if self.costs[index][0] >= than or self.is_late:
                break
            plan = self.plans[index]
            if not self._may_be_faster(plan, than, stalls):
                continue
            self._expect_seconds(range(index, end), best, than, stalls)
            seconds = self.simulated_seconds(far_ahead(plan, best))
            stalls.learn(plan, seconds)
            if seconds < than:
                other = self._fitting(plan, limit)
                if other is not None and other.step_seconds < than:
                    best, than = other, other.step_seconds
        return best

    def _may_be_faster(self, plan: Plan, than: Seconds, stalls: Stalls) -> bool:
        """Whether a simulation of `plan` may find that it takes less than these seconds."""
        return self._least_seconds(plan) < than and stalls.likely_seconds(plan) < than

    def _expect_seconds(
        self, indices: Sequence[int], best: Plan, than: Seconds, stalls: Stalls
    ) -> None:
        """Simulate the seconds of the first few of these plans at once, if not known.

        Those that may take less than `than`, gathered as far ahead as `best`.
        """
        if self.foresight is None or self.foresight.width < 2:
            return
        likely = self._likely(indices, best, than, stalls)
        next_one = next(likely, None)
        if next_one is None or self.foresight.knows_seconds(next_one):
            return
        self.foresight.expect(seconds=[next_one, *islice(likely, self.foresight.width - 1)])

    def _likely(
        self, indices: Sequence[int], best: Plan, than: Seconds, stalls: Stalls
    ) -> Iterator[Plan]:
        """The plans at `indices` that may be that fast, gathered as far ahead as `best`."""
        for index in indices:
            if self.costs[index][0] >= than:
                return
            plan = self.plans[index]
            if self._may_be_faster(plan, than, stalls):
                yield far_ahead(plan, best)

    def _fitting(self, plan: Plan, limit: Bytes | None) -> Plan | None:
        """`plan`, compared, with as many buckets ahead as make it faster; None if too large."""
        if limit is not None and self.simulated_peak(plan) > limit:
            return None
        return self.deepened(self.compared(plan), limit)

    def _best_of_baselines(
        self,
        found: Plan | None,
        seconds: Seconds,
        limit: Bytes | None,
        most: Seconds = ANY_TIME,
    ) -> Plan | None:
        """`found`, or the fastest baseline that fits and is faster once both are simulated.

        Simulation may reverse the order of plans whose additive times are nearly equal, and may
        find that baselines fit where no other plan does. `seconds` is the additive time of `found`.
        Memory is simulated of faster baselines only, and time of those that may be faster and
        take less than `most` seconds.
        """
        if not self.chooses_baselines or (self.is_late and found is not None):
            return found
        than = most if found is None else min(found.step_seconds, most)
        about = Seconds(max(_NEAR_TIE * seconds, 0.0 if found is None else found.step_seconds))
        near = [
            (known if found is None else far_ahead(known, found), index, known)
            for index, known in enumerate(self._near(about, limit))
            if self._least_seconds(known) < than
        ]
        if self.foresight is not None:
            self.foresight.expect(seconds=[as_deep for as_deep, _, _ in near])
        times = [(self.simulated_seconds(as_deep), index, known) for as_deep, index, known in near]
        for time, _, known in sorted(times, key=lambda one: one[:2]):
            if time >= than or (self.is_late and found is not None):
                break
            compared = self._fitting(known, limit)
            if compared is not None and compared.step_seconds < than:
                return compared
        return found

    def _near(self, seconds: Seconds, limit: Bytes | None) -> Iterator[Plan]:
        """Baselines of at most `seconds`, without those that exceed `limit`.

        Only these are built.
        """
        both = zip(names_of(self.baselines), costs_of(self.baselines), strict=True)
        for index, (name, (time, most)) in enumerate(both):
            too_large = limit is not None and LEAST_SHARE * most > limit
            if time > seconds or name in self.broken or too_large:
                continue
            least = 0 if self.least_of_baseline is None else self.least_of_baseline(index)
            if limit is None or least <= limit:
                yield self.baselines[index]

    def _or_pipeline(
        self, found: Plan | None, limit: Bytes | None, within: Seconds = ANY_TIME
    ) -> Plan | None:
        """`found`, or a pipeline that fits and is clearly faster once both are simulated.

        Pipelines need `train_step`, so a small gain does not justify them. The simulation of one
        takes seconds, so those are left out that would be no faster if they were slowed down as
        another one of their kind is, or take `within` seconds or longer.
        """
        slower: dict[tuple[object, ...], float] = {}
        for index, (seconds, _) in enumerate(costs_of(self.pipelines)):
            known = math.inf if found is None else found.step_seconds / (1 + _GAIN)
            most = min(known, within)
            if seconds >= most or (self.is_late and found is not None):
                continue
            one = self.pipelines[index]
            kind = one.schedule, one.stages, one.micro_batches, tuple(sorted(one.mesh.shape))
            if seconds * slower.get(kind, 1.0) < most:
                compared = self.compared(one)
                slower[kind] = compared.step_seconds / seconds
                fits = limit is None or compared.peak_bytes <= limit
                if fits and compared.step_seconds < most:
                    found = compared
        return found

    def _fastest_listed(self, limit: Bytes, most: Seconds) -> tuple[int | None, float]:
        """The fastest plan that fits, and the least ratio of simulated to additive memory.

        Plans of `most` seconds or more by their tables are not tried.

        First tries the plan of least memory among those about as fast as the fastest; then the
        plans that would fit at the smallest ratio seen so far, and the next faster one while that
        fits, whose ratio may be smaller; the others only if none of those fits. After the deadline
        it is the first that fits by its table, or else the smallest.
        """
        mosts = [most for _, most in self.costs]
        left = [
            index
            for index, (seconds, peak) in enumerate(self.costs)
            if seconds < most and (peak <= limit or self._may_fit(index, limit))
        ]
        found: int | None = None
        share = math.inf
        good = self.good
        first = max((i for i in left if i < good), default=-1)
        while left:
            likely = next((i for i in left if share * mosts[i] <= limit), None)
            # Those in `left` are faster than what was found, the last one by least.
            index = likely if likely is not None else left[0] if found is None else left[-1]
            if share == math.inf and first >= 0 and mosts[index] > limit:
                index = first
            if self.is_late:
                if found is not None:
                    break
                index = next((i for i in left if mosts[i] <= limit), left[-1])
            peak = self.simulated_peak(self.plans[index])
            share = min(share, peak / mosts[index])
            if peak <= limit:
                found, left = index, left[: left.index(index)]
            elif likely is None and found is not None:
                break
            else:
                left.remove(index)
        return found, share

    def _may_fit(self, index: int, limit: Bytes) -> bool:
        """Whether the plan at `index`, which is too large by its tables, may fit into `limit`."""
        return _LEAST_OF_ALL * self.costs[index][1] <= limit and self._min_bytes(index) <= limit

    def _min_bytes(self, index: int) -> Bytes:
        """A lower bound of the settled memory of the plan at `index`."""
        return self.costs[index][1] if self.least is None else Bytes(self.least(index))

    def _smallest(self) -> Plan:
        """The plan that needs the least memory.

        Plans of one mesh and one number of micro-batches have about the same ratio of simulated to
        additive memory. Those that would not be smaller at the least ratio seen are not simulated.
        """
        shares: dict[tuple[object, ...], float] = {}
        best = self.compared(self.plans[-1])
        for index in range(len(self.plans) - 1, -1, -1):
            plan, most = self.plans[index], self.costs[index][1]
            group = plan.mesh.shape, plan.micro_batches, plan.stages
            least = max(self._min_bytes(index), shares.get(group, 0.0) * most)
            if least < best.peak_bytes or index == len(self.plans) - 1:
                found = self.compared(plan)
                shares[group] = min(shares.get(group, math.inf), found.peak_bytes / most)
                best = min(found, best, key=lambda one: one.peak_bytes)
        return best
