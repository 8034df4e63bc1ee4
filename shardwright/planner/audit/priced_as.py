"""The strategy nearest to a given one that has a price."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from shardwright.ir.graph import Graph
from shardwright.ir.options.mixed_precision import dtypes_of
from shardwright.ir.strategy.fields import DTYPE_FIELDS, chunks_of
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.strategies.form import loss_chunks_of
from shardwright.planner.strategies.unpriced import unpriced_fields
from shardwright.rules.operators.loss_chunks import LossChunksError, most_logits
from shardwright.rules.operators.mlp_chunks import largest_mlp

_DEFAULTS = {one.name: one.default for one in fields(Strategy) if one.name != "recompute"}


@dataclass(frozen=True, slots=True)
class Replaced:
    """A field that is priced with another value, because its own value has no price yet.

    Attributes:
        field: the name of the field.
        given: its value.
        priced: the value that is priced instead.
        same: whether both values compute the same, as a fused loss and one in chunks do.
    """

    field: str
    given: Any
    priced: Any
    same: bool = False


def priced_as(
    strategy: Strategy, graph: Graph, machine: Machine
) -> tuple[Strategy, tuple[Replaced, ...]]:
    """The nearest strategy that has a price on `machine`, and the fields in which it differs.

    Dtypes become those of the captured `graph`. Raises `StrategyError` where the replaced fields
    contradict the others.
    """
    now = strategy
    if strategy.loss == "fused":
        with suppress(LossChunksError):  # then it is priced as the default
            now = now.but(loss=f"chunked({loss_chunks_of(strategy, graph)})")
    # The graph is searched for what has chunks only if there are any, which is rare.
    loss, mlp = chunks_of(now.loss) or 1, chunks_of(strategy.mlp) or 1
    loss = 1 if loss > 1 and most_logits(graph) == (0, 0) else loss
    mlp = 1 if mlp > 1 and largest_mlp(graph) == (0, 0) else mlp
    numerics = replace(graph.numerics, loss_chunks=loss, mlp_chunks=mlp)
    for _ in fields(Strategy):
        if not (names := [name for name, _ in unpriced_fields(now, numerics, machine.device)]):
            break
        now = now.but(**{name: _nearest(now, name) for name in names})
    dtypes = dict(zip(DTYPE_FIELDS, dtypes_of(graph), strict=True))
    known = {n: d for n, d in dtypes.items() if d and getattr(now, n) not in (None, d)}
    now = now.but(**known)
    differing = (
        Replaced(name, given, priced, same=given == "fused" and chunks_of(priced) is not None)
        for name in (one.name for one in fields(Strategy))
        if (given := getattr(strategy, name)) != (priced := getattr(now, name))
    )
    return now, tuple(differing)


def _nearest(strategy: Strategy, name: str) -> Any:
    """The value of a field to try in place of that of `strategy`: without parameters on the host.

    Of other fields it is the default.
    """
    if name == "offload" and "parameters" in strategy.offload:
        return tuple(one for one in strategy.offload if one != "parameters")
    return _DEFAULTS[name]


def merged(strategy: Strategy, priced: Strategy, proposal: Strategy) -> Strategy:
    """`strategy` with the fields in which `proposal` differs from `priced`.

    `priced` is the strategy whose price stands for that of `strategy` (`priced_as`). A dtype that
    the proposal does not set stays that of `strategy`. Raises `StrategyError` if the fields
    contradict each other.
    """
    changes = {
        one.name: getattr(proposal, one.name)
        for one in fields(Strategy)
        if getattr(proposal, one.name) != getattr(priced, one.name)
    }
    silent = [name for name in DTYPE_FIELDS if changes.get(name, name) is None]
    return strategy.but(**{name: v for name, v in changes.items() if name not in silent})
