"""The one strategy of all that mean the same: without what has no effect."""

from __future__ import annotations

from typing import Any

from shardwright.ir.strategy.fields import AXES
from shardwright.ir.strategy.strategy import Strategy


def canonical(strategy: Strategy) -> Strategy:
    """The strategy with fields that change nothing at their defaults.

    Equal results mean equal training. What has no effect: the style of a degree of 1, the kind of
    sharding over one device, synchronisation of a single micro-batch, a value that equals what its
    field means by default.

    >>> str(canonical(Strategy.parse("dp_shard=8 zero=0 sp=off cp_style=ulysses")))
    'dp_replicate=8'
    """
    changes: dict[str, Any] = {}
    if strategy.tp == 1:
        changes["sequence_parallel"] = True
        if strategy.loss == "whole":
            changes["loss"] = "vocabulary-parallel"
    if strategy.cp == 1:
        changes["cp_style"] = "ring-zigzag"
    if strategy.pp == 1:
        changes |= {"schedule": "1F1B", "virtual_stages": 1, "stage_cut": None}
    if strategy.etp is not None and strategy.etp == strategy.but(etp=None).expert_tensor:
        changes["etp"] = None
    strategy = _canonical_storage(strategy.but(**changes))
    strategy = strategy.but(order=_canonical_order(strategy))
    reduces = strategy.dp_replicate * strategy.dp_shard * strategy.cp > 1
    default = strategy.but(gradient_sync=None).syncs_every
    if not reduces or strategy.micro_batches == 1 or strategy.syncs_every == default:
        strategy = strategy.but(gradient_sync=None)
    return strategy


def _canonical_storage(strategy: Strategy) -> Strategy:
    order = strategy.order
    beside = abs(order.index("dp_shard") - order.index("dp_replicate")) == 1
    if strategy.zero == 0 and (beside or strategy.dp_replicate == 1) and strategy.dp_shard > 1:
        # Sharding of nothing is replication.
        swapped = tuple(_swapped(axis) if not beside else axis for axis in order)
        replicas = strategy.dp_replicate * strategy.dp_shard
        strategy = strategy.but(dp_replicate=replicas, dp_shard=1, order=swapped)
    if strategy.dp_shard * strategy.cp == 1:
        strategy = strategy.but(zero=3)
    if strategy.zero < 3 or strategy.dp_shard * strategy.cp == 1:
        return strategy.but(reshard_after_forward=None)
    if strategy.reshards == strategy.but(reshard_after_forward=None).reshards:
        return strategy.but(reshard_after_forward=None)
    return strategy


def _swapped(axis: str) -> str:
    return {"dp_shard": "dp_replicate", "dp_replicate": "dp_shard"}.get(axis, axis)


def _canonical_order(strategy: Strategy) -> tuple[str, ...]:
    """The order of the axes with more than one device; the others at the places of the default."""
    active = [axis for axis in strategy.order if getattr(strategy, axis) > 1]
    if active == [axis for axis in AXES if axis in active]:
        return AXES
    return (*active, *(axis for axis in AXES if axis not in active))
