"""Searches again where messages take longer than the operators that hide them.

Let C be the seconds of operators and of other messages, H those of messages of parameters and of
their gradients, and o the fraction of H that operators hide. A step takes about the larger of
C + (1 - o) H and H. A search adds up the first; where the second is larger, plans that communicate
less are better than it says. Then, and where its best plan is far from its bound, a second search
adds up C + H (`Machine.charges_hidden`): such a step takes at most that, and at least the part
1 / (1 + o) of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.layout import Bytes
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.planner.deadline import NEVER, Deadline
from shardwright.planner.plans.searched_frontier import SearchedFrontier

_CLOSE = 1.2  # a plan that takes at most this multiple of its bound needs no second search
_PACED = 0.8  # nor does one whose messages of parameters take less than this part of a step
_FAR = 1.5  # a plan that takes more than this multiple of its bound needs one in any case

Bound = Callable[[Bytes], float]  # bytes -> a lower bound of the seconds of all plans within them


class PricedSearch(Protocol):
    """A search on a machine; `known` is a lower bound that another search found."""

    def __call__(self, machine: Machine, known: Bound) -> SearchedFrontier:
        """The frontier that it finds."""


def with_slow_networks(
    search: PricedSearch,
    machine: Machine,
    limit: str | int | None,
    deadline: Deadline = NEVER,
) -> SearchedFrontier:
    """The frontier that `search` finds, by both prices if messages take longer than operators.

    Of both frontiers that with the faster plan within `limit` is returned, as in
    `Frontier.fastest`. There is no second search after the deadline.
    """
    found = search(machine, lambda _peak: 0.0)
    if not machine.most_overlap:
        return found
    try:
        best = found.fastest_compared(limit)
    except InfeasibleError:
        return found
    if deadline.is_over or not _needs_another(best):
        return found
    other = search(replace(machine, charges_hidden=True), found.least_within)
    other = replace(other, search_seconds=found.search_seconds + other.search_seconds)
    faster = other.fastest_within(other.limit(limit), best.step_seconds)
    return found if faster is None else other


def _needs_another(plan: Plan) -> bool:
    """Whether messages of parameters may decide how long a step takes, or the plan is far off."""
    weights = {one.name for one in plan.parameters}
    sent = sum(one.seconds for one in plan.transfers if one.value in weights)
    over = plan.step_seconds / max(plan.lower_bound_seconds, 1e-12)
    return over > _FAR or (over > _CLOSE and sent > _PACED * plan.step_seconds)
