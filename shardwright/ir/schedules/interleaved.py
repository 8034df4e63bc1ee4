"""Schedules in which a group has several stages and takes them in turn.

Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2) and ZB1P (arXiv 2401.10241, section
3), in which a backward pass is made in halves and gradients of weights fill the bubbles.
Oracle: the orders that `torch.distributed.pipelining` makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwright.ir.schedules.schedule import Kind, Pass, Schedule


def _interleaved(
    group: int, groups: int, stages: int, micro_batches: int, *, split: bool
) -> Iterator[Pass]:
    """Micro-batches in rounds of about as many as groups, all stages of the group in each round.

    Backward passes begin two forward passes later for every group that is behind, or one later
    where they are `split`: there, those of weights follow as many passes later as groups are
    ahead, which is when others would wait.
    """
    each = stages // groups
    round_size = micro_batches // max(1, micro_batches // groups)
    total = each * micro_batches

    def at(place: int, *, back: bool) -> tuple[int, int]:
        """Stage and micro-batch of the forward or backward pass at a place."""
        rounds, turn = divmod(place, round_size * each)
        local, number = divmod(turn, round_size)
        local = each - 1 - local if back else local
        return local * groups + group, rounds * round_size + number

    hops = groups - 1 - group
    ahead = min((each - 1) * round_size + (1 if split else 2) * hops, total)
    later = group if split else total
    for place in range(ahead):
        yield Pass(*at(place, back=False), Kind.FORWARD)
    for place in range(total):
        if place + ahead < total:
            yield Pass(*at(place + ahead, back=False), Kind.FORWARD)
        yield Pass(*at(place, back=True), Kind.INPUTS if split else Kind.BACKWARD)
        if place >= later:
            yield Pass(*at(place - later, back=True), Kind.WEIGHTS)
    for place in range(max(0, total - later), total) if split else ():
        yield Pass(*at(place, back=True), Kind.WEIGHTS)


def _whole_rounds(groups: int, _stages: int, micro_batches: int) -> str:
    if micro_batches % max(1, micro_batches // groups) == 0:
        return ""
    return (
        f"takes micro-batches in rounds of {groups}, which {micro_batches} are not; take a"
        f" multiple of {groups}"
    )


INTERLEAVED_1F1B = Schedule(
    "Interleaved1F1B",
    partial(_interleaved, split=False),
    stages_per_group=None,
    needs=_whole_rounds,
    tried=(2, 4),
)
INTERLEAVED_ZERO_BUBBLE = Schedule(
    "InterleavedZeroBubble",
    partial(_interleaved, split=True),
    stages_per_group=None,
    needs=_whole_rounds,
    splits_backward=True,
    tried=(1, 2),
)
