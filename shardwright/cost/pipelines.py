"""Seconds of a step through pipeline stages, and the activations that wait in each.

Paper: PipeDream-Flush, called 1F1B (arXiv 2006.09503), and GPipe (arXiv 1811.06965).
Oracle: for equal stages both take (M + P - 1) · t, M micro-batches, P stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.layout import Seconds
from shardwright.ir.pipeline import ASYNC

Ints = NDArray[np.int64]

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
    takes = np.outer((_FORWARD, 1 - _FORWARD), [stage.micro_batch for stage in stages])
    ways = np.zeros((2, count))  # of what a pass needs from the stage before, and from that behind
    ways[0, 1:] = ways[1, :-1] = [stage.receives for stage in stages[1:]]
    # When each pass is done, of stages and of what is there from the start at either end.
    done = np.zeros((2, count + 2, micro_batches))
    clocks = np.zeros(count)
    for back, at, number in _waves(schedule, count, micro_batches):
        ready = done[back, at + 2 * back, number] + ways[back, at]
        clocks[at] = np.maximum(clocks[at], ready) + takes[back, at]
        done[back, at + 1, number] = clocks[at]
    return Seconds(max(c + stage.once for c, stage in zip(clocks.tolist(), stages, strict=True)))


def least_step_seconds(
    schedule: str, alone: float, once: float, stages: int, micro_batches: int
) -> Seconds:
    """What no pipeline beats that together does what takes one of its groups `alone` seconds.

    At most `once` of them are spent once a step, the others on micro-batches.

    Let S be what all stages take for one micro-batch, f and b of one stage the forward and backward
    pass. In 1F1B a stage makes its first backward pass when the micro-batch has gone forward
    through all stages and come back. After that it makes M - 1 backward passes and the forward
    passes that are left, which are all but the w before; then the last goes back through the stages
    before it. So a step takes T >= S + (M - 1) b + (M - w) f = S + c (f + b), with c known for each
    stage. Together the stages make S, which is thus at most (T - S) times the sum of all 1 / c.
    In GPipe they first wait for the slowest forward, then for the slowest backward pass, which
    are at least the mean: T >= S + (M - 1) S / P.

    >>> round(least_step_seconds("1F1B", 8.0, 0.0, 2, 4), 6)  # even stages take 5.0
    4.823529
    """
    mean = alone / stages
    if schedule.startswith(ASYNC) or math.isinf(alone):
        return Seconds(mean)
    waits = (micro_batches - 1) / stages
    if schedule != "GPipe" and micro_batches > 1:
        ahead = (in_flight(schedule, s, stages, micro_batches) for s in range(stages))
        left = (
            (micro_batches - 1) * (1 - _FORWARD) + (micro_batches - w) * _FORWARD for w in ahead
        )
        waits = 1 / sum(1 / c for c in left)
    return Seconds(max(mean, (alone - once) / micro_batches * (1 + waits)))


@lru_cache(maxsize=64)
def _waves(schedule: str, stages: int, micro_batches: int) -> tuple[tuple[Ints, Ints, Ints], ...]:
    """The passes in waves, each of passes that depend on earlier waves only.

    Of every pass of a wave whether it is a backward pass (0 or 1), its stage and its micro-batch.
    """
    orders = [list(order_of(schedule, s, stages, micro_batches)) for s in range(stages)]
    wave: dict[tuple[int, int, bool], int] = {}  # stage, micro-batch, whether forward
    last, places = [0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for s, order in enumerate(orders):
            while places[s] < len(order):
                number, forward = order[places[s]]
                other = s - 1 if forward else s + 1
                needs = wave.get((other, number, forward)) if 0 <= other < stages else -1
                if needs is None:
                    break
                last[s] = wave[s, number, forward] = max(last[s], needs) + 1
                places[s] += 1
        assert sum(places) > before, f"the schedule {schedule} waits for itself"
    found: dict[int, list[tuple[int, int, int]]] = {}
    for (s, number, forward), when in wave.items():
        found.setdefault(when, []).append((not forward, s, number))
    rows = (np.array(found[when], np.int64).T for when in sorted(found))
    return tuple((back, at, number) for back, at, number in rows)


def order_of(
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
