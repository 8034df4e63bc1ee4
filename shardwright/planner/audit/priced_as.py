"""The strategy nearest to a given one that has a price."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from shardwright.ir.graph import Graph
from shardwright.ir.strategy.fields import DTYPE_FIELDS
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.strategies.unpriced import dtypes_of, unpriced_fields

_DEFAULTS = {one.name: one.default for one in fields(Strategy) if one.name != "recompute"}


@dataclass(frozen=True, slots=True)
class Replaced:
    """A field that is priced with another value, because its own has no price yet.

    Attributes:
        field: its name.
        given: its value.
        priced: the value instead.
    """

    field: str
    given: Any
    priced: Any


def priced_as(strategy: Strategy, graph: Graph) -> tuple[Strategy, tuple[Replaced, ...]]:
    """The nearest strategy with a price, and the fields that differ; none where it has one.

    Dtypes become those of the captured `graph`. Raises `StrategyError` where the replaced fields
    contradict the others.
    """
    now = strategy
    for _ in fields(Strategy):
        if not (names := [name for name, _ in unpriced_fields(now)]):
            break
        now = now.but(**{name: _DEFAULTS[name] for name in names})
    dtypes = dict(zip(DTYPE_FIELDS, dtypes_of(graph), strict=True))
    known = {n: d for n, d in dtypes.items() if d and getattr(now, n) not in (None, d)}
    now = now.but(**known)
    differing = (
        Replaced(one.name, getattr(strategy, one.name), getattr(now, one.name))
        for one in fields(Strategy)
        if getattr(strategy, one.name) != getattr(now, one.name)
    )
    return now, tuple(differing)


def merged(strategy: Strategy, priced: Strategy, proposal: Strategy) -> Strategy:
    """`strategy` with the fields in which a `proposal` differs from what it is `priced` as.

    A proposal without a dtype has that of the strategy. Raises `StrategyError` where these fields
    contradict the others.
    """
    changes = {
        one.name: getattr(proposal, one.name)
        for one in fields(Strategy)
        if getattr(proposal, one.name) != getattr(priced, one.name)
    }
    silent = [name for name in DTYPE_FIELDS if changes.get(name, name) is None]
    return strategy.but(**{name: v for name, v in changes.items() if name not in silent})
