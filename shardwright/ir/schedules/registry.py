"""All pipeline schedules, by name."""

from __future__ import annotations

from functools import lru_cache

from shardwright.ir.schedules.breadth_first import LOOPED_BFS
from shardwright.ir.schedules.interleaved import INTERLEAVED_1F1B, INTERLEAVED_ZERO_BUBBLE
from shardwright.ir.schedules.schedule import Pass, PipelineError, Schedule
from shardwright.ir.schedules.single_stage import CONTINUOUS, GPIPE, ONE_F_ONE_B
from shardwright.ir.schedules.zero_bubble_v import ZBV_ZERO_BUBBLE

SCHEDULES: dict[str, Schedule] = {
    one.name: one
    for one in (
        *(GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, INTERLEAVED_ZERO_BUBBLE, ZBV_ZERO_BUBBLE),
        LOOPED_BFS,
        *CONTINUOUS,
    )
}


def schedule_named(name: str) -> Schedule:
    """The schedule of this name; raises `PipelineError` with all names if there is none.

    >>> schedule_named("ZBVZeroBubble").homes(2, 4)
    (0, 1, 1, 0)
    """
    if name not in SCHEDULES:
        raise PipelineError(f"the schedule {name!r} is none of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def continuous(weights: str) -> Schedule:
    """The asynchronous schedule whose passes use these weights; else `PipelineError`."""
    for schedule in SCHEDULES.values():
        if schedule.weights == weights:
            return schedule
    known = ", ".join(s.weights for s in SCHEDULES.values() if s.weights is not None)
    raise PipelineError(f"no asynchronous schedule uses the weights {weights!r}; there are {known}")


@lru_cache(maxsize=64)
def orders(
    schedule: str, groups: int, stages: int, micro_batches: int
) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each of `groups` groups of devices, which take turns at the `stages`."""
    order = schedule_named(schedule).order
    return tuple(tuple(order(g, groups, stages, micro_batches)) for g in range(groups))
