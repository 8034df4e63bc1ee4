"""Searches again with what only saves memory, if that is tight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol, TypeVar

from shardwright.ir.frontier import Frontier, costs_of
from shardwright.planner.deadline import NEVER, Deadline
from shardwright.planner.plans.searched_frontier import LEAST_SHARE, SearchedFrontier

F = TypeVar("F", bound=Frontier, covariant=True)


class Search(Protocol[F]):
    """A search that tries micro-batches and chunks of the loss only if memory is tight.

    It tries the first `ways` to keep state of the optimizer on the host, too.
    """

    def __call__(self, *, tight: bool, ways: int = 0) -> F:
        """The frontier that it finds."""


def if_needed(
    run: Search[SearchedFrontier],
    found: SearchedFrontier,
    limit: str | int | None,
    ways: range,
) -> SearchedFrontier:
    """`found`, or a frontier with more on the host if nothing fits else.

    Copies from the host take longer than an update on the device in any case. `ways` are numbers of
    ways to keep state of the optimizer there that may be tried besides, in their order.
    """
    most = found.limit(limit)
    for number in ways:
        if most is None:
            break
        every = found.plans, found.baselines, found.pipelines
        least = min((peak for plans in every for _, peak in costs_of(plans)), default=math.inf)
        if least <= most or found.simulated_peak(found[-1]) <= most:
            break
        more = run(tight=True, ways=number)
        found = replace(more, search_seconds=found.search_seconds + more.search_seconds)
    return found


def if_tight(run: Search[F], limit: str | int | None = None, deadline: Deadline = NEVER) -> F:
    """The frontier that `run` finds, with what only saves memory if `limit` requires it.

    Micro-batches and chunks of the loss save memory and never make a step faster. So they are tried
    only if none of the plans that are about as fast as the fastest fits. To decide this, the plan
    of least memory among them is simulated, unless it is far too large. `limit` is as in
    `Frontier.fastest`. A frontier down to the least memory (`PlanOptions.whole`) needs them in any
    case, and is not searched by this. After the deadline any plan is enough that fits by its table.
    """
    plain = run(tight=False)
    most = plain.limit(limit)
    smallest = plain.good - 1
    added = plain.costs[smallest][1]
    if most is None or added <= most:
        return plain
    if deadline.is_over and plain.costs[-1][1] <= most:
        return plain
    if LEAST_SHARE * added <= most and plain.simulated_peak(plain[smallest]) <= most:
        return plain
    more = run(tight=True)
    return replace(more, search_seconds=plain.search_seconds + more.search_seconds)
