"""Schedules of one stage for each group: GPipe, 1F1B, and continuous 1F1B without flushes.

GPipe (arXiv 1811.06965) makes all forward passes, then all backward passes. 1F1B (PipeDream-Flush,
arXiv 2006.09503) makes as many forward passes as stages are behind, then one backward and one
forward pass in turns. PipeDream's (arXiv 1806.03377) does so without a flush.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.schedules.schedule import Kind, Pass, Schedule
from shardwright.ir.schedules.weight_versions import WEIGHTS


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Of how many micro-batches a stage of 1F1B keeps activations at most.

    >>> [in_flight(stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(micro_batches, stages - stage)


def _in_turns(stage: int, ahead: int, micro_batches: int) -> Iterator[Pass]:
    """Forward passes of `ahead` micro-batches, then one backward and one forward pass in turns."""
    for number in range(ahead):
        yield Pass(stage, number, Kind.FORWARD)
    for number in range(micro_batches):
        yield Pass(stage, number, Kind.BACKWARD)
        if number + ahead < micro_batches:
            yield Pass(stage, number + ahead, Kind.FORWARD)


def _all_forward_first(
    group: int, _groups: int, _stages: int, micro_batches: int
) -> Iterator[Pass]:
    return _in_turns(group, micro_batches, micro_batches)


def _one_forward_one_backward(
    group: int, _groups: int, stages: int, micro_batches: int
) -> Iterator[Pass]:
    return _in_turns(group, in_flight(group, stages, micro_batches), micro_batches)


def _the_whole_batch(_groups: int, _stages: int, micro_batches: int) -> str:
    if micro_batches == 1:
        return ""
    return f"takes the batch as a whole, not in {micro_batches} micro-batches"


def _waits_of_gpipe(groups: int, micro_batches: int, _forward: float) -> float:
    """Groups wait for the slowest forward, then for the slowest backward pass."""
    return (micro_batches - 1) / groups


def _waits_of_1f1b(groups: int, micro_batches: int, forward: float) -> float:
    """See `least_step_seconds`: each stage waits c times what it takes, and together they are 1."""
    if micro_batches == 1:
        return 0.0
    ahead = (in_flight(stage, groups, micro_batches) for stage in range(groups))
    left = ((micro_batches - 1) * (1 - forward) + (micro_batches - w) * forward for w in ahead)
    return 1 / sum(1 / c for c in left)


GPIPE = Schedule("GPipe", _all_forward_first, waits=_waits_of_gpipe)
ONE_F_ONE_B = Schedule("1F1B", _one_forward_one_backward, waits=_waits_of_1f1b)
# Their mini-batches follow each other without a break, as micro-batches do in 1F1B.
CONTINUOUS = tuple(
    Schedule(f"async {weights}", _one_forward_one_backward, needs=_the_whole_batch, weights=weights)
    for weights in WEIGHTS
)
