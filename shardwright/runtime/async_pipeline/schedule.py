"""The order of work in an asynchronous pipeline.

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

from shardwright.ir.schedules.weight_versions import lag


@dataclass(frozen=True, slots=True)
class StagePasses:
    """The passes of a stage when a mini-batch arrives: `forward` of it, then `backward` of another.

    `backward` is None while the pipeline fills, `forward` is None while it drains.
    """

    forward: int | None
    backward: int | None


def call_at(minibatch: int, stage: int, stages: int, start: int) -> StagePasses:
    """The passes of a stage when `minibatch` arrives; `start` is the first in the pipeline."""
    behind = minibatch - lag(stage, stages)
    return StagePasses(minibatch, behind if behind >= start else None)


def remaining(stage: int, stages: int, start: int, stop: int) -> Iterator[StagePasses]:
    """The passes that remain when no mini-batch follows `stop - 1`: the drain.

    Of a pipeline with fewer mini-batches than `lag`, the first calls have none.
    """
    for behind in range(stop - lag(stage, stages), stop):
        yield StagePasses(None, behind if behind >= start else None)
