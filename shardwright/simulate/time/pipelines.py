"""Computes seconds of a step through pipeline stages.

Every group of devices runs its passes in the order of the schedule (`ir/schedules`, with the
papers), each as soon as its input has arrived. A forward pass takes a third of a micro-batch's
time. If a backward pass has two parts, each of them takes a third, too.

Oracles: with equal stages, M micro-batches, and P groups that take t each for all their stages and
both passes, a step takes M t + (P - 1) t with GPipe and 1F1B. The second term, the bubble, is
divided by v if groups have v stages (Megatron-LM, arXiv 2104.04473), by 3 with ZB1P and by 6 with
ZB-V (arXiv 2401.10241). Another oracle is the simulated timeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.ir.layout import Seconds
from shardwright.ir.schedules.registry import schedule_named
from shardwright.ir.schedules.schedule import Kind
from shardwright.simulate.time.pipeline_schedules import waves

_FORWARD = 1 / 3  # of the time of both passes: a backward pass computes twice as much


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage.

    `micro_batch` are those of both passes of one micro-batch, and `once` those of work that is done
    once a step. `receives` are the seconds to transfer one micro-batch's values from the previous
    stage, and again to transfer their gradients back. A stage that `splits` computes gradients of
    weights separately from those of received values, if the schedule has passes for both.
    """

    micro_batch: float
    once: float = 0.0
    receives: float = 0.0
    splits: bool = True


def step_seconds(
    schedule: str, stages: Sequence[StageTime], micro_batches: int, groups: int | None = None
) -> Seconds:
    """Seconds from the first forward pass until all stages have run their update.

    With an asynchronous schedule, the seconds between two updates of the slowest stage.

    Args:
        schedule: the name of the schedule.
        stages: the seconds of each stage.
        micro_batches: micro-batches in a step.
        groups: groups of devices, among which stages are divided; None: one for each stage.

    >>> round(step_seconds("1F1B", [StageTime(1.0)] * 4, 8), 6)
    11.0
    >>> round(step_seconds("Interleaved1F1B", [StageTime(0.5)] * 8, 8, groups=4), 6)
    9.5
    """
    (found,) = steps_seconds(schedule, [stages], micro_batches, groups)
    return found


def steps_seconds(
    schedule: str,
    pipelines: Sequence[Sequence[StageTime]],
    micro_batches: int,
    groups: int | None = None,
) -> list[Seconds]:
    """`step_seconds` of several `pipelines` with equally many stages and the same schedule."""
    if not pipelines:
        return []
    spec = schedule_named(schedule)
    if spec.asynchronous:
        return [
            Seconds(max(s.micro_batch + s.once + 2 * s.receives for s in stages))
            for stages in pipelines
        ]
    count, groups = len(pipelines[0]), groups or len(pipelines[0])
    # (stages, pipelines) each.
    halves, micro_batch, receives, once = (
        np.array([[getattr(stage, part) for stage in stages] for stages in pipelines]).T
        for part in ("splits", "micro_batch", "receives", "once")
    )
    takes = np.zeros((len(Kind), *halves.shape))
    takes[Kind.FORWARD] = _FORWARD
    takes[Kind.BACKWARD] = 1 - _FORWARD
    takes[Kind.INPUTS] = np.where(halves, (1 - _FORWARD) / 2, 1 - _FORWARD)
    takes[Kind.WEIGHTS] = np.where(halves, (1 - _FORWARD) / 2, 0.0)
    takes *= micro_batch
    ways = np.zeros((2, *halves.shape))  # of inputs from the previous and the next stage
    ways[0, 1:] = ways[1, :-1] = receives[1:]
    # The end of each pass (forward or not, stage + 1, micro-batch, pipeline); 0 at either end.
    done = np.zeros((2, count + 2, micro_batches, len(pipelines)))
    clocks = np.zeros((groups, len(pipelines)))
    for group, kind, at, number in waves(schedule, groups, count, micro_batches):
        back = (kind != Kind.FORWARD).astype(np.int64)
        arrives = kind != Kind.WEIGHTS
        ready = done[back, at + 2 * back, number] + ways[back, at]
        ready[~arrives] = 0.0
        clocks[group] = np.maximum(clocks[group], ready) + takes[kind, at]
        done[back[arrives], at[arrives] + 1, number[arrives]] = clocks[group[arrives]]
    for updated, home in zip(once, spec.homes(groups, count), strict=True):
        clocks[home] += updated
    return [Seconds(seconds) for seconds in clocks.max(axis=0).tolist()]


def least_step_seconds(
    schedule: str, alone: float, once: float, stages: int, micro_batches: int
) -> Seconds:
    """A lower bound on the step of a pipeline whose whole work takes one group `alone` seconds.

    At most `once` of these are spent once a step, the others on micro-batches. `stages` is the
    number of groups, P below; some schedules give a group several stages.

    Let S be the seconds of one micro-batch in all stages, and f and b those of its forward and
    backward pass in one stage. In 1F1B a stage starts its first backward pass when a micro-batch
    has gone forward through all stages and back to it. Before that it made w forward passes. After
    it come M - 1 backward passes and the M - w other forward passes, and the last backward pass
    goes through the stages before it. So a step takes at least
    T = S + (M - 1) b + (M - w) f = S + c (f + b) with a known c for each stage. The sum of f + b
    over the stages is S, so S is at most T - S times the sum of all 1 / c.

    In GPipe, micro-batches wait first for the slowest forward pass and then for the slowest
    backward pass, which take at least the mean: T >= S + (M - 1) S / P.

    If groups have several stages, or backward passes have two parts, the bubble may almost vanish.
    Then the bound is one micro-batch that goes through all stages and back, without gradients of
    weights if these are computed separately.

    >>> round(least_step_seconds("1F1B", 8.0, 0.0, 2, 4), 6)  # even stages take 5.0
    4.823529
    """
    spec, mean = schedule_named(schedule), alone / stages
    if spec.asynchronous or math.isinf(alone):
        return Seconds(mean)
    each = (alone - once) / micro_batches  # S
    if spec.waits is None:
        return Seconds(max(mean, each * ((1 + _FORWARD) / 2 if spec.splits_backward else 1.0)))
    return Seconds(max(mean, each * (1 + spec.waits(stages, micro_batches, _FORWARD))))


def least_of_slowest(stages: int, micro_batches: int, work: float, longest: float) -> Seconds:
    """A lower bound on a 1F1B step, one stage of which takes at least `longest` seconds.

    `work` are the seconds of all passes of all stages, and `longest` those of all passes of one
    stage. As in `least_step_seconds`, the stage starts its first backward pass when a micro-batch
    has gone through all stages and back. Then it makes M - 1 backward passes, and all forward
    passes except for at most `stages` of them.

    >>> round(least_of_slowest(4, 8, 32.0, 8.0), 6), step_seconds("1F1B", [StageTime(1.0)] * 4, 8)
    (10.0, 11.0)
    """
    left = micro_batches - min(stages, micro_batches)
    each = (micro_batches - 1) * (1 - _FORWARD) + left * _FORWARD
    return Seconds((work + each * longest) / micro_batches)
