"""Chooses between the fastest plan of a search and others that are nearly as fast.

Preferred are uniform strategies, and plans that torch's allocator holds with its fragments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwright.ir.frontier import (
    ANY_TIME,
    MOST_PREFETCHED,
    Frontier,
    costs_of,
    names_of,
)
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.plans.searched_frontier import LEAST_SHARE

NEAR = 1e-2  # a plan slower by at most this fraction is preferred for what it is
_EQUAL = 5e-4  # relative gains below this count as zero
_TRIES = 8  # the most strategies whose memory is simulated
_LOWER = 2  # the most lower limits within which a plan is looked for that the allocator holds


@dataclass(frozen=True, slots=True)
class Preferred:
    """The plan to return within a memory limit, and the plans that it was chosen from.

    Attributes:
        plan: `uniform` if it is slower than `fastest` by at most `NEAR`, else `fastest`; settled.
        fastest: the fastest plan found; it and `uniform` are compared and may have no timeline.
        uniform: the fastest uniform strategy found that fits; None if there is none.

    All gather as many buckets of parameters ahead as make them faster.
    """

    plan: Plan
    fastest: Plan
    uniform: Plan | None

    @property
    def gain(self) -> float | None:
        """The fraction of the uniform strategy's time that the fastest plan saves; None without."""
        if self.uniform is None:
            return None
        return 1 - self.fastest.step_seconds / self.uniform.step_seconds

    def __str__(self) -> str:
        if self.uniform is None or self.gain is None:
            return ""
        name = self.uniform.name
        if self.plan.name != name:
            ms = self.uniform.step_seconds * 1e3
            seconds = f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
            best = f"the best uniform strategy, {name}: {seconds}"
            return f"takes {self.gain:.1%} less time than {best}"
        if self.gain < _EQUAL:
            return f"uniform strategy {name}; nothing faster was found"
        return f"uniform strategy {name}; the fastest plan found takes {self.gain:.1%} less time"


def is_strategy(plan: Plan) -> bool:
    """Whether the name of a plan is the text of a strategy."""
    return _is_text(plan.name)


def _is_text(name: str) -> bool:
    try:
        Strategy.parse(name)
    except StrategyError:
        return False
    return True


def preferred(frontier: Frontier, memory_limit: str | int | None = None) -> Preferred:
    """The plan to return: a uniform strategy if it is at most one per cent slower than the fastest.

    A plan that fits, but not with the fragments of torch's allocator, gives way to one that does
    and is at most as much slower.
    Raises `InfeasibleError` as `Frontier.fastest` does.
    """
    first = _preferred(frontier, memory_limit)
    if frontier.is_late or not _excess(frontier, first.plan):
        found = None
    else:
        found = _kept_by_allocator(frontier, first)
    found = found or first
    plan = frontier.noted(frontier.settled(found.plan))
    if found.plan.name != found.fastest.name:
        plan = replace(plan, notes=(*plan.notes, str(found)))
    gain = 1 - first.plan.step_seconds / plan.step_seconds
    if gain > _EQUAL:
        note = (
            "torch's allocator holds this plan with fragments, and may not hold one that takes"
            f" {gain:.1%} less time"
        )
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(found, plan=plan)


def _excess(frontier: Frontier, plan: Plan) -> Bytes:
    """Bytes that the allocator would reserve beyond a device; 0 if the plan does not fit anyway.

    It takes less than to settle a plan of many layers, of which most are not shown.
    """
    has = frontier.device_bytes
    if has is None or plan.peak_bytes > has:
        return Bytes(0)
    return Bytes(max(0, frontier.reserved(plan) - has))


def _kept_by_allocator(frontier: Frontier, found: Preferred) -> Preferred | None:
    """A choice of less memory that torch's allocator holds, and that is about as fast; or None."""
    limit, tried = frontier.device_bytes or 0, found.plan
    most = Seconds((1 + NEAR) * found.plan.step_seconds)
    for _ in range(_LOWER):
        limit = min(limit - _excess(frontier, tried), tried.peak_bytes - 1)
        fastest = frontier.fastest_within(Bytes(limit), most)
        if fastest is None:
            return None
        other = _or_uniform(frontier, fastest, limit, most)
        tried = other.plan
        if not _excess(frontier, tried):
            return other
    return None


def _preferred(frontier: Frontier, memory_limit: str | int | None) -> Preferred:
    """The preferred plan without regard to fragments of memory; it is compared."""
    fastest = frontier.fastest_compared(memory_limit)
    return _or_uniform(frontier, fastest, memory_limit)


def _or_uniform(
    frontier: Frontier,
    fastest: Plan,
    memory_limit: str | int | None,
    most: Seconds = ANY_TIME,
) -> Preferred:
    """`fastest`, or a uniform strategy about as fast that takes less than `most` seconds."""
    if is_strategy(fastest):
        return Preferred(fastest, fastest, fastest)
    if frontier.is_late:
        return Preferred(fastest, fastest, None)
    uniform = _best_fitting(frontier, memory_limit, most)
    found = Preferred(fastest, fastest, uniform)
    if uniform is None or found.gain is None or found.gain > NEAR:
        return found
    return replace(found, plan=uniform)


def _best_fitting(frontier: Frontier, memory_limit: str | int | None, most: Seconds) -> Plan | None:
    """The fastest baseline that is a uniform strategy and fits, compared; None if there is none.

    Times that baselines are listed with are about lower bounds. Those of `most` seconds or more,
    and those that are far too large, are not compared.
    """
    limit = frontier.limit(memory_limit)
    names, costs = names_of(frontier.baselines), costs_of(frontier.baselines)
    known = [
        index
        for index, name in enumerate(names)
        if name not in frontier.broken
        and _is_text(name)
        and (limit is None or LEAST_SHARE * costs[index][1] <= limit)
    ]
    order = sorted(known, key=lambda i: costs[i][0])[:_TRIES]
    best, than = None, most
    for place, index in enumerate(order):
        if costs[index][0] >= than:
            break
        one = frontier.baselines[index]
        if than < math.inf and (1 - MOST_PREFETCHED) * frontier.simulated_seconds(one) >= than:
            continue
        if limit is not None and frontier.simulated_peak(one) > limit:
            continue
        likely = (i for i in order[place:] if costs[i][0] < than)
        frontier.expect_deepened((frontier.baselines[i] for i in likely), limit)
        one = frontier.deepened(frontier.compared(one), limit)
        if one.step_seconds < than:
            best, than = one, one.step_seconds
    return best
