"""Seconds of a step through pipeline stages, and the activations that wait in each.

Paper: PipeDream-Flush, called 1F1B (arXiv 2006.09503), and GPipe (arXiv 1811.06965).
Oracle: for equal stages both take (M + P - 1) · t, M micro-batches, P stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.ir.layout import Seconds
from shardwright.ir.pipeline import ASYNC

_FORWARD = 1 / 3  # of the time of both passes: a backward pass computes twice as much


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage: of both passes of one micro-batch, and of what is done once a step.

    `receives` is the way of one micro-batch's values from the stage before,
    and that of their gradients back.
    """

    micro_batch: float
    once: float = 0.0
    receives: float = 0.0


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Of how many micro-batches a stage keeps activations at most.

    >>> [in_flight("1F1B", stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    if schedule.startswith(ASYNC):
        return stages - stage  # mini-batches, as they follow each other without a break
    return micro_batches if schedule == "GPipe" else min(micro_batches, stages - stage)


def step_seconds(schedule: str, stages: Sequence[StageTime], micro_batches: int) -> Seconds:
    """From the first forward pass until all stages have made their update.

    Of an asynchronous pipeline from one update of the slowest stage to its next.

    Every stage does its passes in the order of the schedule, each as soon as
    what it needs has arrived.

    >>> round(step_seconds("1F1B", [StageTime(1.0)] * 4, 8), 6)
    11.0
    """
    if schedule.startswith(ASYNC):
        return Seconds(max(s.micro_batch + s.once + 2 * s.receives for s in stages))
    count = len(stages)
    orders = [list(_order(schedule, s, count, micro_batches)) for s in range(count)]
    done: dict[tuple[int, int, bool], float] = {}  # stage, micro-batch, whether forward -> when
    clocks, places = [0.0] * count, [0] * count
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for s in range(count):
            while places[s] < len(orders[s]):
                number, forward = orders[s][places[s]]
                start = _ready(done, stages, s, number, forward)
                if start is None:
                    break
                part = _FORWARD if forward else 1 - _FORWARD
                clocks[s] = max(clocks[s], start) + part * stages[s].micro_batch
                done[s, number, forward] = clocks[s]
                places[s] += 1
                moved = True
        assert moved, f"the schedule {schedule} waits for itself"
    return Seconds(max(c + stage.once for c, stage in zip(clocks, stages, strict=True)))


def least_step_seconds(
    schedule: str, alone: float, once: float, stages: int, micro_batches: int
) -> Seconds:
    """What no pipeline beats that together does what takes one of its groups `alone` seconds.

    At most `once` of them are spent once a step, the others on micro-batches.

    A stage waits for the first forward pass of all before it, makes its own passes over M
    micro-batches, and all before it make the last backward pass after it. Let R be what the stages
    before it take for one micro-batch: it can take (T - R) / M of a step of T seconds, so each
    stage leaves at most the part 1 - 1/M of T - R, and P stages take at most
    T (1 - (1 - 1/M)^P) for one micro-batch. And one of them takes the mean of all.

    >>> least_step_seconds("1F1B", 8.0, 0.0, 2, 1), least_step_seconds("1F1B", 8.0, 0.0, 2, 4)
    (8.0, 4.571428571428571)
    """
    mean = alone / stages
    if schedule.startswith(ASYNC) or math.isinf(alone):
        return Seconds(mean)
    busy = micro_batches * (1 - (1 - 1 / micro_batches) ** stages)
    return Seconds(max(mean, (alone - once) / busy))


def _ready(
    done: dict[tuple[int, int, bool], float],
    stages: Sequence[StageTime],
    stage: int,
    number: int,
    forward: bool,
) -> float | None:
    """When what a pass needs of a neighbour is there; None if that is not known yet."""
    last = len(stages) - 1
    if (forward and stage == 0) or (not forward and stage == last):
        return 0.0
    other = stage - 1 if forward else stage + 1
    way = stages[max(stage, other)].receives
    when = done.get((other, number, forward))
    return None if when is None else when + way


def _order(
    schedule: str, stage: int, stages: int, micro_batches: int
) -> Iterator[tuple[int, bool]]:
    """The passes of a stage: number of the micro-batch, and whether it is a forward pass."""
    ahead = in_flight(schedule, stage, stages, micro_batches)
    for number in range(ahead):
        yield number, True
    for number in range(micro_batches):
        yield number, False
        if number + ahead < micro_batches:
            yield number + ahead, True
