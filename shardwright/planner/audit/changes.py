"""Single changes of a strategy, on the same devices with the same global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.ir.options.fp8 import GATHERABLE
from shardwright.ir.strategy.fields import COMPILES, CP_STYLES, LOSSES, OFFLOADS, chunks_of
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute, StrategyError
from shardwright.ir.strategy.strategy import ModelLimits, Strategy, divisors
from shardwright.planner.strategies.frontier.enumeration import rescheduled

_DATA = ("dp_shard", "dp_replicate")


@dataclass(frozen=True, slots=True)
class StrategyChange:
    """A change of one field of a strategy, and of the other fields that must change with it.

    Attributes:
        field: the field that the change is about.
        before, after: its values.
        strategy: the changed strategy.
    """

    field: str
    before: Any
    after: Any
    strategy: Strategy


def single_changes(
    strategy: Strategy, limits: ModelLimits, host: int, chunks: int | None = None
) -> Iterator[StrategyChange]:
    """Changes of single fields that do not contradict the other fields.

    A higher degree takes devices from data parallelism and a lower one returns them; where the
    batch is then not divisible, there are fewer micro-batches. A changed strategy may still not
    fit the model.

    Args:
        strategy: the strategy.
        limits: the model's batch and layers.
        host: the number of devices of a host; HSDP shards within one.
        chunks: a number of chunks of the loss to try; None: none.
    """
    made = (
        *_degrees(strategy, limits),
        *_data(strategy, host),
        *_micro_batches(strategy, limits),
        *_recompute(strategy),
        *_storage(strategy),
        *_schedules(strategy, limits),
        *_losses(strategy, chunks),
        *_others(strategy),
    )
    seen = {strategy}
    for field, changes in made:
        try:
            found = strategy.but(**changes)
        except StrategyError:
            continue
        if found not in seen:
            seen.add(found)
            before, after = getattr(strategy, field), getattr(found, field)
            yield StrategyChange(field, before, after, found)


_Made = Iterator[tuple[str, dict[str, Any]]]


def _degrees(strategy: Strategy, limits: ModelLimits) -> _Made:
    """Half and twice the degrees of tensor, context and pipeline parallelism."""
    for name in ("tp", "cp", "pp"):
        degree = getattr(strategy, name)
        for wanted in (degree // 2, degree * 2):
            if wanted < 1 or (wanted < degree and degree % 2):
                continue
            changes = _moved(strategy, name, wanted)
            if changes is None:
                continue
            if name == "pp":
                changes |= _pipeline(strategy, wanted)
            if _fits_batch(strategy, changes, limits):
                yield name, changes


def _moved(strategy: Strategy, name: str, wanted: int) -> dict[str, Any] | None:
    """The fields that trade devices with data parallelism; None if it has too few to trade."""
    degree = getattr(strategy, name)
    for data in _DATA:
        ranks = getattr(strategy, data) * degree
        if ranks % wanted == 0 and (getattr(strategy, data) > 1 or wanted < degree):
            return {name: wanted, data: ranks // wanted}
    return None


def _pipeline(strategy: Strategy, wanted: int) -> dict[str, Any]:
    """The fields to reset for another number of pipeline groups: schedule, cut, micro-batches."""
    if wanted == 1:
        return {"schedule": "1F1B", "virtual_stages": 1, "stage_cut": None}
    changes: dict[str, Any] = {"stage_cut": None}
    if strategy.micro_batches < wanted:
        changes["micro_batches"] = 2 * wanted
    return changes


def _fits_batch(strategy: Strategy, changes: dict[str, Any], limits: ModelLimits) -> bool:
    """Whether the batch divides over changed ranks; if need be with fewer micro-batches."""
    if limits.batch is None:
        return True
    data = 1
    for name in _DATA:
        data *= changes.get(name, getattr(strategy, name))
    if limits.batch % data:
        return False
    count = changes.get("micro_batches", strategy.micro_batches)
    fewer = max(n for n in divisors(limits.batch // data) if n <= count)
    if fewer != strategy.micro_batches:
        changes["micro_batches"] = fewer
    return True


def _data(strategy: Strategy, host: int) -> _Made:
    """Data parallelism sharded over all ranks, within each host (HSDP), and not at all."""
    ranks = strategy.dp_replicate * strategy.dp_shard
    inside = max(1, host // (strategy.tp * strategy.cp))
    for shard in (ranks, inside, 1):
        if ranks % shard == 0 and shard != strategy.dp_shard:
            zero = 3 if strategy.dp_shard == 1 and shard > 1 else strategy.zero
            yield "dp_shard", {"dp_shard": shard, "dp_replicate": ranks // shard, "zero": zero}


def _micro_batches(strategy: Strategy, limits: ModelLimits) -> _Made:
    data, now = strategy.dp_replicate * strategy.dp_shard, strategy.micro_batches
    each = (limits.batch or now * data) // data
    smaller = [n for n in divisors(each) if n < now][-1:]
    larger = [n for n in divisors(each) if n > now][:1]
    for count in (*smaller, *larger):
        yield "micro_batches", {"micro_batches": count}


def _recompute(strategy: Strategy) -> _Made:
    for level in (NONE, Recompute("every", 4), Recompute("every", 2), FULL):
        yield "recompute", {"recompute": level}


def _storage(strategy: Strategy) -> _Made:
    """Other ZeRO stages, and gathered parameters freed after the forward pass or kept.

    Stage 3 that keeps them has the price of stage 2, so it is not a change of its own.
    """
    if strategy.dp_shard * strategy.cp == 1:
        return
    for zero in (0, 1, 3) if strategy.zero == 3 else (0, 1, 2, 3):
        if zero != strategy.zero:
            yield "zero", {"zero": zero, "reshard_after_forward": None}
    if strategy.zero == 3:
        yield "reshard_after_forward", {"reshard_after_forward": not strategy.reshards}


def _schedules(strategy: Strategy, limits: ModelLimits) -> _Made:
    layers = limits.layers or strategy.stages
    if strategy.pp == 1:
        return
    names = ("schedule", "virtual_stages")
    for one in (
        strategy.but(schedule="1F1B", virtual_stages=1, stage_cut=None),
        *rescheduled(strategy.but(stage_cut=None), layers),
    ):
        field = names[one.schedule == strategy.schedule]
        yield field, {**{name: getattr(one, name) for name in names}, "stage_cut": None}


def _losses(strategy: Strategy, chunks: int | None) -> _Made:
    if chunks_of(strategy.loss) is not None:
        yield "loss", {"loss": LOSSES[0]}
        return
    if strategy.tp > 1:
        yield from (("loss", {"loss": loss}) for loss in LOSSES[:2])
    if chunks is not None:
        yield "loss", {"loss": f"chunked({chunks})"}


def _others(strategy: Strategy) -> _Made:
    """Changes of fields that leave all degrees as they are."""
    if strategy.tp > 1:
        yield "sequence_parallel", {"sequence_parallel": not strategy.sequence_parallel}
        yield "async_tp", {"async_tp": not strategy.async_tp}
    if strategy.cp > 1:
        yield from (("cp_style", {"cp_style": style}) for style in CP_STYLES)
    if strategy.fp8 in GATHERABLE:
        yield "fp8_gather", {"fp8_gather": not strategy.fp8_gather}
    yield from (("compile", {"compile": word}) for word in COMPILES)
    together = {"optimizer", "parameters"}  # the state is where parameters are
    for what in ({"activations"}, {"optimizer"}, {"parameters"}, together):
        others = set(strategy.offload) ^ what
        if "parameters" in others:
            others |= together
        if others != set(strategy.offload):
            yield "offload", {"offload": tuple(one for one in OFFLOADS if one in others)}
