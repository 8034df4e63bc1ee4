"""Searches again with what only saves memory, if that is tight."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from shardwright.ir.frontier import Frontier, costs_of
from shardwright.planner.plans.searched_frontier import SearchedFrontier

F = TypeVar("F", bound=Frontier, covariant=True)


class Search(Protocol[F]):
    """A search that tries micro-batches and chunks of the loss only if memory is tight.

    With `on_host` it tries the optimizer's state in the memory of the host, too.
    """

    def __call__(self, *, tight: bool, on_host: bool = False) -> F:
        """The frontier that it finds."""


def if_needed(
    run: Search[SearchedFrontier], limit: str | int | None, *, on_host: bool
) -> SearchedFrontier:
    """The frontier of `if_tight`, with the optimizer's state on the host if nothing fits else.

    Copies of the state take longer than its update in any case. It is tried where `on_host` says
    that it may be.
    """
    found = if_tight(run, limit)
    most = found.limit(limit)
    if not on_host or most is None:
        return found
    every = found.plans, found.baselines, found.pipelines
    least = min(peak for plans in every for _, peak in costs_of(plans))
    if least <= most or found.simulated_peak(found[-1]) <= most:
        return found
    more = run(tight=True, on_host=True)
    return replace(more, search_seconds=found.search_seconds + more.search_seconds)


def if_tight(run: Search[F], limit: str | int | None = None) -> F:
    """The frontier that `run` finds, with what only saves memory if `limit` requires it.

    Micro-batches and chunks of the loss save memory and never make a step faster. So they are tried
    only if none of the plans that are about as fast as the fastest fits. To decide this, the plan
    of least memory among them is simulated. `limit` is as in `Frontier.fastest`.
    """
    plain = run(tight=False)
    most = plain.limit(limit)
    smallest = plain.good - 1
    if most is None or plain.costs[smallest][1] <= most:
        return plain
    if plain.simulated_peak(plain[smallest]) <= most:
        return plain
    more = run(tight=True)
    return replace(more, search_seconds=plain.search_seconds + more.search_seconds)
