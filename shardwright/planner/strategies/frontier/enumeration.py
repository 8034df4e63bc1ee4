"""All sensible uniform strategies of a model on a machine.

Degrees divide the number of devices and the sizes that they split; tensor parallelism stays on the
innermost links. Omitted are: GPipe, which needs more memory than 1F1B; ZeRO-2, which equals ZeRO-3
that keeps gathered parameters; context parallelism of short sequences, unless data parallelism has
more ranks than the batch has samples; tensor parallelism inside of experts while a rank has several
of them; more pipeline groups than micro-batches; pipelines inside of data parallelism. Pipelines
use 1F1B; other schedules are tried on the best of them (`rescheduled`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute
from shardwright.ir.strategy.strategy import ModelLimits, Strategy, divisors
from shardwright.machine.model import Machine
from shardwright.planner.strategies.roles import nests

LEVELS = (NONE, Recompute("every", 2), FULL)
_LONG = 32_768  # `cp` is tried for sequences of at least this many tokens
_MOST_STAGES = 64
_ROUNDS = 16  # the most micro-batches per pipeline group


@dataclass(frozen=True, slots=True)
class Limited:
    """The limits of an enumeration.

    Attributes:
        model: the sizes of the model that limit degrees.
        tp: the degrees of tensor parallelism that split weights evenly.
        widest_tp: the largest degree of tensor parallelism that is tried.
        pipelines: whether the model can be cut into stages.
        micro_batches: the numbers of micro-batches that the graph supports.
    """

    model: ModelLimits
    tp: tuple[int, ...]
    widest_tp: int
    pipelines: bool
    micro_batches: tuple[int, ...]


def strategies_on(machine: Machine, limited: Limited) -> Iterator[Strategy]:
    """Every sensible strategy for all devices of `machine`."""
    for degrees in _degrees(machine, limited):
        for staged in _schedules(degrees, limited):
            for stored in _storages(staged):
                for recompute in LEVELS if limited.model.layers else (NONE,):
                    yield replace(stored, recompute=recompute)


def _degrees(machine: Machine, limited: Limited) -> Iterator[Strategy]:
    """All combinations of degrees, each with one micro-batch."""
    model, devices = limited.model, machine.devices
    batch = model.batch or 1
    stages = min(model.layers or 1, _MOST_STAGES) if limited.pipelines else 1
    for tp in (n for n in limited.tp if n <= limited.widest_tp and devices % n == 0):
        for pp in (n for n in divisors(devices // tp) if n <= stages):
            rest = devices // tp // pp
            for cp in divisors(rest):
                data = rest // cp
                long = (model.sequence or 0) >= _LONG or batch < rest
                if batch % data or (cp > 1 and not (long and _splits_sequence(cp, model))):
                    continue
                for shard in divisors(data):
                    found = Strategy(
                        dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, zero=0
                    )
                    found = found if pp == 1 else replace(found, pp=pp, schedule="GPipe")
                    yield from _experts(found, model)


def _experts(dense: Strategy, model: ModelLimits) -> Iterator[Strategy]:
    """Replicated experts, or expert parallelism over the innermost ranks.

    Features of experts are split as those of dense layers only where ranks have one expert each,
    because before that more expert parallelism leaves larger products.
    """
    yield dense
    ranks = dense.dp_shard * dense.cp * dense.tp
    for ep in divisors(model.experts or 1)[1:]:
        for etp in dict.fromkeys((1, dense.tp if ep == model.experts else 1)):
            one = replace(dense, ep=ep, etp=etp) if ranks % (ep * etp) == 0 else None
            if one is not None and nests(one):
                yield one


def _splits_sequence(cp: int, model: ModelLimits) -> bool:
    return model.sequence is not None and model.sequence % (2 * cp) == 0


def _schedules(degrees: Strategy, limited: Limited) -> Iterator[Strategy]:
    """All numbers of micro-batches for these degrees; pipelines use 1F1B."""
    left = (limited.model.batch or 1) // (degrees.dp_replicate * degrees.dp_shard)
    counts = [n for n in limited.micro_batches if left % n == 0]
    if degrees.pp == 1:
        yield from (replace(degrees, micro_batches=count) for count in counts)
        return
    for count in (n for n in counts if degrees.pp <= n <= _ROUNDS * degrees.pp):
        yield replace(degrees, schedule="1F1B", micro_batches=count)


def rescheduled(strategy: Strategy, layers: int) -> Iterator[Strategy]:
    """The same pipeline under schedules with several stages a group or split backward passes."""
    for name, schedule in SCHEDULES.items():
        if schedule.asynchronous or strategy.pp == 1 or name in ("GPipe", "1F1B"):
            continue
        given = schedule.stages_per_group
        for each in (given,) if given else dict.fromkeys((*schedule.tried, 2, 4)):
            runs = not schedule.needs(strategy.pp, strategy.pp * each, strategy.micro_batches)
            if runs and strategy.pp * each <= layers:
                yield replace(strategy, schedule=name, virtual_stages=each)


def _storages(strategy: Strategy) -> Iterator[Strategy]:
    """Ways to store parameters: replicated, or sharded with gathered copies kept or regathered."""
    if strategy.dp_shard * strategy.cp == 1:
        yield strategy
        return
    if strategy.dp_shard == 1:
        yield strategy
    yield replace(strategy, zero=3, reshard_after_forward=True if strategy.pp > 1 else None)
    yield replace(strategy, zero=3, reshard_after_forward=None if strategy.pp > 1 else False)
