"""The order of work in an asynchronous pipeline, and the staleness of its weights.

A continuous 1F1B that never flushes (PipeDream, arXiv 1806.03377). N stages, k
from 0, a mini-batch m every two ticks:

    forward  of m on stage k: tick 2m + k
    backward of m on stage k: tick 2m + 2N - 1 - k, then an update of its weights

So a stage starts with N - k forward passes and then alternates one backward and
one forward pass: `call_at` and, at the end, `remaining` give that order, mini-batch by mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Horizon:
    """The number of updates of its stage by which each of the two passes predicts weights."""

    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class StagePasses:
    """The passes of a stage when a mini-batch arrives: `forward` of it, then `backward` of another.

    `backward` is None while the pipeline fills, `forward` is None while it drains.
    """

    forward: int | None
    backward: int | None


def lag(stage: int, stages: int) -> int:
    """Updates that a stage makes between the two passes of a mini-batch: N - k - 1."""
    return stages - stage - 1


def spectrain_horizon(stage: int, stages: int) -> Horizon:
    """SpecTrain (arXiv 1809.02839): to the end of the mini-batch's round trip at stage 0.

    The backward pass predicts ⌊k/2⌋ updates, the number of complete rounds (a forward and a
    backward pass) in the k ticks until its gradient reaches stage 0. The forward pass predicts
    `lag` more.

    >>> [(h.forward, h.backward) for h in (spectrain_horizon(k, 4) for k in range(4))]
    [(3, 0), (2, 0), (2, 1), (1, 1)]
    """
    return Horizon(stage // 2 + lag(stage, stages), stage // 2)


def pipeoptim_horizon(stage: int, stages: int) -> Horizon:
    """PipeOptim (arXiv 2312.00839): the forward pass predicts the weights of the backward pass."""
    return Horizon(lag(stage, stages), 0)


def call_at(minibatch: int, stage: int, stages: int, start: int) -> StagePasses:
    """The passes of a stage when `minibatch` arrives; `start` is the first in the pipeline."""
    behind = minibatch - lag(stage, stages)
    return StagePasses(minibatch, behind if behind >= start else None)


def remaining(stage: int, stages: int, start: int, stop: int) -> Iterator[StagePasses]:
    """The passes that remain when no mini-batch follows `stop - 1`: the drain."""
    for m in range(max(start, stop - lag(stage, stages)), stop):
        yield StagePasses(None, m)
