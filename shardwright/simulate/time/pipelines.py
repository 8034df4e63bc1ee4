"""Seconds of a step through pipeline stages.

Every group of devices makes its passes in the order of the schedule (`ir/schedules`, with the
papers), each as soon as what it needs has arrived. A forward pass is a third of a micro-batch's
time; where a backward pass is made in halves, each of them is one too.
Oracles: with equal stages, M micro-batches and P groups of which each takes t for all its stages
and both passes, a step takes M t + (P - 1) t of GPipe and 1F1B, a vth of that waiting where groups
have v stages (Megatron-LM, arXiv 2104.04473), a third in ZB1P and a sixth in ZB-V (arXiv
2401.10241); and the timeline, which knows tasks.
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
    """Seconds of one stage: both passes of one micro-batch, and the work that is done once a step.

    `receives` are the seconds to transfer one micro-batch's values from the previous stage, and
    again to transfer their gradients back. A stage that `splits` computes gradients of weights
    separately from those of received values, if the schedule has passes for both.
    """

    micro_batch: float
    once: float = 0.0
    receives: float = 0.0
    splits: bool = True


def step_seconds(
    schedule: str, stages: Sequence[StageTime], micro_batches: int, groups: int | None = None
) -> Seconds:
    """Seconds from the first forward pass until all stages have run their update.

    For an asynchronous pipeline, the seconds between two updates of the slowest stage. Stages are
    assigned to `groups` of devices, by default one group per stage.

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
    """`step_seconds` of several pipelines of equally many stages under one schedule."""
    if not pipelines:
        return []
    spec = schedule_named(schedule)
    if spec.asynchronous:
        return [
            Seconds(max(s.micro_batch + s.once + 2 * s.receives for s in stages))
            for stages in pipelines
        ]
    count, groups = len(pipelines[0]), groups or len(pipelines[0])
    # Stage by stage, a column for each pipeline.
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
    ways = np.zeros((2, *halves.shape))  # of what a pass needs from the stage before or behind
    ways[0, 1:] = ways[1, :-1] = receives[1:]
    # When each pass is done, of stages and of what is there from the start at either end.
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

    At most `once` of them are spent once a step, the others on micro-batches. `stages` are the
    groups, each of which may have several in schedules that are made for that.

    Let S be what all stages take for one micro-batch, f and b of one stage the forward and backward
    pass. In 1F1B a stage makes its first backward pass when the micro-batch has gone forward
    through all stages and come back. After that it makes M - 1 backward passes and the forward
    passes that are left, which are all but the w before; then the last goes back through the stages
    before it. So a step takes T >= S + (M - 1) b + (M - w) f = S + c (f + b), with c known for each
    stage. Together the stages make S, which is thus at most (T - S) times the sum of all 1 / c.
    In GPipe they first wait for the slowest forward, then for the slowest backward pass, which
    are at least the mean: T >= S + (M - 1) S / P.
    Where groups have several stages, or backward passes come in halves, waiting may all but
    vanish: a micro-batch goes through all stages and back, for which gradients of weights need not
    be there.

    >>> round(least_step_seconds("1F1B", 8.0, 0.0, 2, 4), 6)  # even stages take 5.0
    4.823529
    """
    spec, mean = schedule_named(schedule), alone / stages
    if spec.asynchronous or math.isinf(alone):
        return Seconds(mean)
    each = (alone - once) / micro_batches  # of which one passes all stages, and others wait
    if spec.waits is None:
        return Seconds(max(mean, each * ((1 + _FORWARD) / 2 if spec.splits_backward else 1.0)))
    return Seconds(max(mean, each * (1 + spec.waits(stages, micro_batches, _FORWARD))))


def least_of_slowest(stages: int, micro_batches: int, work: float, longest: float) -> Seconds:
    """A lower bound on the step of 1F1B, of which one stage takes at least `longest` seconds.

    `work` are the seconds of the passes of all stages, and `longest` those of the passes of one of
    them, for all micro-batches. As in `least_step_seconds`: the stage makes its first backward pass
    when a micro-batch has gone through all stages and come back, and then M - 1 backward passes and
    all forward passes but at most one for each stage.

    >>> round(least_of_slowest(4, 8, 32.0, 8.0), 6), step_seconds("1F1B", [StageTime(1.0)] * 4, 8)
    (10.0, 11.0)
    """
    left = micro_batches - min(stages, micro_batches)
    each = (micro_batches - 1) * (1 - _FORWARD) + left * _FORWARD
    return Seconds((work + each * longest) / micro_batches)
