"""ZB-V (arXiv 2401.10241, section 6): two stages a group, and backward passes in halves.

Oracle: the order that `torch.distributed.pipelining` makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from shardwright.ir.schedules.schedule import Kind, Pass, Schedule


def _in_a_v(group: int, groups: int, _stages: int, micro_batches: int) -> Iterator[Pass]:
    """ZB-V: down through all groups and up again, so that each has a first and a last stage.

    The order is made for at least twice as many micro-batches as groups, less one; those that are
    not there are left out.
    """
    down, up = group, 2 * groups - 1 - group
    count = max(2 * groups - 1, micro_batches)
    forward, both = (Kind.FORWARD,), (Kind.INPUTS, Kind.WEIGHTS)
    made: Counter[tuple[int, Kind]] = Counter()

    def steps() -> Iterator[tuple[int, Sequence[Kind]]]:
        yield from [(down, forward)] * (2 * (groups - group) - 1)
        yield from [(up, forward), (down, forward)] * group
        yield from [(up, forward + both)] * (groups - group)
        while made[up, Kind.FORWARD] < max(made[down, Kind.FORWARD], count):
            if made[down, Kind.FORWARD] < count:
                yield down, forward
            yield down, both
            yield up, forward + both
        yield from [(down, both[:1]), (up, both[:1])] * group
        yield from [(down, both)] * (groups - group)
        for stage in (up, down):
            yield from [(stage, both[1:])] * (count - made[stage, Kind.WEIGHTS])

    for stage, kinds in steps():
        for kind in kinds:
            number = made[stage, kind]
            made[stage, kind] += 1
            if number < micro_batches:
                yield Pass(stage, number, kind)


def _homes(groups: int, stages: int) -> tuple[int, ...]:
    """Down through all groups, and up again."""
    down = tuple(range(groups))
    return (down + down[::-1])[:stages]


ZBV_ZERO_BUBBLE = Schedule(
    "ZBVZeroBubble",
    _in_a_v,
    stages_per_group=2,
    homes=_homes,
    splits_backward=True,
    tried=(2,),
)
