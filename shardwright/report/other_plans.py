"""Simulates the plans of a search that are shown beside the chosen one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from shardwright.ir.frontier import Frontier, undominated
from shardwright.ir.plan import Plan

ALTERNATIVES = 5
_TRIED = 7  # the most that are simulated, if fewer are no alternatives
_LEAST = 0.01  # the least relative gain in time or memory of an alternative
_SLOWEST = 2.0  # times the step of the chosen plan
_LARGEST = 2.5  # times the limit: plans that need more memory are no help

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OtherPlans:
    """Simulated plans of a frontier, by their index on it.

    Attributes:
        fitting: plans that fit into the memory limit; all of them without a limit.
        larger: plans that need more.
    """

    fitting: Mapping[int, Plan]
    larger: Mapping[int, Plan]

    @property
    def simulated(self) -> dict[int, Plan]:
        """All of them."""
        return {**self.fitting, **self.larger}

    @property
    def costs(self) -> list[tuple[float, int]]:
        """Seconds and bytes of all of them."""
        return [(one.step_seconds, one.peak_bytes) for one in self.simulated.values()]

    def offered(self, plan: Plan) -> list[Plan]:
        """Plans that fit and are faster than `plan`, or need less memory, by a hundredth or more.

        Fastest first, none dominated by another.
        """
        seconds, peak = (1 - _LEAST) * plan.step_seconds, (1 - _LEAST) * plan.peak_bytes
        every = self.fitting.values()
        return undominated(
            one for one in every if one.step_seconds < seconds or one.peak_bytes < peak
        )


def other_plans(plan: Plan, frontier: Frontier, limit: int | None) -> OtherPlans:
    """Simulate a few plans of a frontier: some that fit, and two faster ones that need more memory.

    They gather as many buckets of parameters ahead as `plan`, the chosen one, where they fit so.
    Plans that are likely to take several times as long are left out, and those that need several
    times `limit`, in bytes per rank: each is expected to take as much longer than by its tables as
    `plan` does. After the time limit of the search none are simulated.
    """
    if frontier.is_late:
        return OtherPlans({}, {})
    place = frontier.place_of(plan)
    longer = 1.0 if place is None else plan.step_seconds / frontier.costs[place][0]
    costs = [
        (i, longer * seconds, peak)
        for i, (seconds, peak) in enumerate(frontier.costs)
        if i != place
    ]
    fitting = [
        index
        for index, seconds, peak in costs
        if (limit is None or peak <= limit) and seconds <= _SLOWEST * plan.step_seconds
    ]
    faster = [
        index
        for index, seconds, peak in costs
        if limit is not None
        and limit < peak <= _LARGEST * limit
        and seconds < (1 - _LEAST) * plan.step_seconds
    ]
    deeper = _Deeper(plan, frontier, limit)
    found = deeper.compared_by_mesh(spread(fitting, ALTERNATIVES))
    few = len(_fitting(found, limit).offered(plan)) < ALTERNATIVES
    if few and all(one.timeline is None for one in found.values()):  # by few layers: quick
        found = deeper.compared_by_mesh(spread(fitting, _TRIED), found)
    found |= replace(deeper, limit=None).compared(spread(faster, 2))
    return _fitting(found, limit)


def _fitting(found: Mapping[int, Plan], limit: int | None) -> OtherPlans:
    """Simulated plans by whether they fit into `limit` bytes per rank."""
    fits = {i for i, one in found.items() if limit is None or one.peak_bytes <= limit}
    return OtherPlans(
        {i: one for i, one in found.items() if i in fits},
        {i: one for i, one in found.items() if i not in fits},
    )


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of these, evenly spaced, with both ends."""
    if len(items) <= most:
        return list(items)
    part = (len(items) - 1) / (most - 1)
    return [items[round(i * part)] for i in range(most)]


@dataclass(frozen=True, slots=True)
class _Deeper:
    """Compares plans of a frontier with as many buckets ahead as `chosen`, where they fit so."""

    chosen: Plan
    frontier: Frontier
    limit: int | None

    def compared_by_mesh(
        self, indices: Sequence[int], known: Mapping[int, Plan] = MappingProxyType({})
    ) -> dict[int, Plan]:
        """The compared plans at these indices, without those that are likely to be too slow.

        The first plan on each mesh, one of `known` if it is on it, tells by how much others on it
        take longer than by their tables. Where all in a number of micro-batches are too slow, and
        the chosen plan has no more, those in larger numbers are not tried.
        """
        most, costs = _SLOWEST * self.chosen.step_seconds, self.frontier.costs
        every, longer = dict(known), dict[tuple[int, ...], float]()
        for index, one in known.items():
            longer.setdefault(one.mesh.shape, one.step_seconds / costs[index][0])
        by_count: dict[int, list[int]] = {}
        for index in indices:
            by_count.setdefault(self.frontier[index].micro_batches, []).append(index)
        for count, these in sorted(by_count.items()):
            first: dict[tuple[int, ...], int] = {}
            for index in these:
                first.setdefault(self.frontier[index].mesh.shape, index)
            new = {mesh: index for mesh, index in first.items() if mesh not in longer}
            found = self.compared(list(new.values()))
            longer |= {mesh: found[i].step_seconds / costs[i][0] for mesh, i in new.items()}
            left = [index for index in these if index not in every and index not in found]
            found |= self.compared(
                [i for i in left if longer[self.frontier[i].mesh.shape] * costs[i][0] <= most]
            )
            every |= found
            too_slow = (i not in every or every[i].step_seconds > most for i in these)
            if count >= self.chosen.micro_batches and all(too_slow):
                break
        return dict(sorted(every.items()))

    def compared(self, indices: Sequence[int]) -> dict[int, Plan]:
        """The compared plans at these indices."""
        every = {index: self._as_far_ahead(self.frontier[index]) for index in indices}
        self.frontier.expect(list(every.values()))
        found = {}
        for index, deeper in every.items():
            found[index] = self.frontier.compared(deeper)
            if self.limit is not None and found[index].peak_bytes > self.limit:
                found[index] = self.frontier.compared(self.frontier[index])
        return found

    def _as_far_ahead(self, plan: Plan) -> Plan:
        if self.chosen.ahead <= plan.ahead or plan.stages > 1:
            return plan
        return replace(plan, ahead=self.chosen.ahead, timeline=None)
