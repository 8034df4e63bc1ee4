"""A kind of collective that the package does not have: a sum on one rank, which broadcasts it.

`known_without_torch` is what the first of a new kind's two files holds, `runnable` the second.
"""

import torch.distributed as dist

from shardwright.ir.layout import Partial, Replicate
from shardwright.ir.redistribution import Collective, CrossingParts, known
from shardwright.runtime.backend.base import begun
from shardwright.runtime.comm.collectives import STARTS, Arriving
from shardwright.simulate.costs.collectives import PRICES, StepPrice
from shardwright.simulate.memory.collectives import TRANSFERS

NAME = "rooted_all_reduce"


def known_without_torch():
    """The kind, its price and its memory: that of an all-reduce."""

    def price(link, machine):
        calls = 2 * machine.collective_launch_seconds
        return StepPrice(calls + 2 * link.lap_seconds, per_before=2 / link.bytes_per_s)

    kind = known(
        Collective(
            NAME,
            (Partial, Replicate),
            lambda parts: CrossingParts(before=parts - 1, after=parts - 1),
            overwrites=True,
        )
    )
    PRICES.add(kind, price)
    TRANSFERS.add(kind, TRANSFERS[Collective.ALL_REDUCE])
    return kind


def runnable(kind):
    """How ranks run it, with one tensor."""

    def started(bucket, given, _owned):
        (x,) = given
        total = x.clone()
        dist.reduce(total, group=bucket.group, group_dst=0)
        work = begun(dist.broadcast(total, group=bucket.group, group_src=0, async_op=True))
        return Arriving(work, lambda: [total])

    STARTS.add(kind, started)
