"""Looped breadth-first pipelines (arXiv 2211.05953): all micro-batches of a stage, then the next.

A group reads the weights of one stage in all passes that follow each other, so that weights that
are sharded are gathered, and their gradients reduced, while other stages compute.
Oracle: the order that `torch.distributed.pipelining` makes.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.schedules.schedule import Kind, Pass, Schedule


def _breadth_first(group: int, groups: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """All forward passes, stage by stage; then all backward passes, the other way round."""
    mine = range(group, stages, groups)
    for stage in mine:
        yield from (Pass(stage, number, Kind.FORWARD) for number in range(micro_batches))
    for stage in reversed(mine):
        yield from (Pass(stage, number, Kind.BACKWARD) for number in reversed(range(micro_batches)))


LOOPED_BFS = Schedule("LoopedBFS", _breadth_first, stages_per_group=None)
