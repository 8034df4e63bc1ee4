"""Differences between strategies in the numbers that training gives."""

from __future__ import annotations

from shardwright.frameworks.config import TrainingConfig
from shardwright.frameworks.readers.understood import MICRO
from shardwright.ir.strategy.fields import DTYPE_FIELDS
from shardwright.ir.strategy.strategy import Strategy


def changed_results(config: TrainingConfig, strategy: Strategy) -> tuple[str, ...]:
    """Sentences on what training by `strategy` gives that differs from that of the config.

    The global batch and clipping are no part of a strategy and stay. Sums in another order are no
    difference.
    """
    now, found = config.strategy, changed_numbers(config.strategy, strategy)
    if config.semantics.loss_mean == MICRO and _samples(now) != _samples(strategy):
        found.append(
            "the loss is a mean over other micro-batches, which is the same only where all have as"
            " many tokens"
        )
    return tuple(found)


def changed_numbers(now: Strategy, strategy: Strategy) -> list[str]:
    """Sentences on dtypes and reductions of gradients in which a strategy differs from `now`.

    A dtype that is not given in `now` is no difference.
    """
    found = []
    for name in (*DTYPE_FIELDS, "fp8"):
        before, after = getattr(now, name), getattr(strategy, name)
        if before != after and (before is not None or name == "fp8"):
            found.append(f"{name} is {after}, not {before}")
    if now.fp8_gather != strategy.fp8_gather and now.fp8 == strategy.fp8:
        which = ("after", "before") if strategy.fp8_gather else ("before", "after")
        found.append(
            f"weights are rounded to 8 bits {which[1]} they are gathered, not {which[0]} it"
        )
    if now.syncs_every != strategy.syncs_every and not (_once(now) and _once(strategy)):
        found.append(f"gradients are reduced {_when(strategy)}, not {_when(now)}")
    return found


def _once(strategy: Strategy) -> bool:
    """Whether gradients are reduced once a step, or never."""
    return strategy.micro_batches == 1 or strategy.devices == 1 or not strategy.syncs_every


def _when(strategy: Strategy) -> str:
    return f"after {'every' if strategy.syncs_every else 'the last'} micro-batch"


def _samples(strategy: Strategy) -> int:
    """Into how many parts a step's batch is cut, each with a mean of its own."""
    return strategy.micro_batches * strategy.dp_replicate * strategy.dp_shard
