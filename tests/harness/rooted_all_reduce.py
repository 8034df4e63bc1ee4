"""A kind of collective that the package does not have: a sum on one rank, which broadcasts it.

`known_without_torch` is what the first of a new kind's two files holds, `runnable` the second.
"""

import torch.distributed as dist

from shardwright.ir.layout import Partial, Replicate
from shardwright.ir.redistribution import Collective, CrossingParts, known
from shardwright.runtime.backend.base import begun
from shardwright.runtime.comm.collectives import MOVES
from shardwright.runtime.executor.transfers import TRANSFERS
from shardwright.simulate.costs.collectives import PRICES, StepPrice
from shardwright.simulate.memory.collectives import STEPS
from shardwright.simulate.memory.step.transfers import TRANSFERS as TRANSFER_MEMORY

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
    STEPS.add(kind, STEPS[Collective.ALL_REDUCE])
    TRANSFER_MEMORY.add(kind, TRANSFER_MEMORY[Collective.ALL_REDUCE])
    return kind


def runnable(kind):
    """How ranks run it: at once, and as a transfer of one tensor in flight."""

    def moved(x, _move, group, _rank):
        total = x.clone()
        dist.reduce(total, group=group, group_dst=0)
        dist.broadcast(total, group=group, group_src=0)
        return total

    def started(how, given, _owned):
        (x,) = given
        total = x.clone()
        dist.reduce(total, group=how.group, group_dst=0)
        work = begun(dist.broadcast(total, group=how.group, group_src=0, async_op=True))
        return how.arriving(work, lambda: [total])

    MOVES.add(kind, moved)
    TRANSFERS.add(kind, started)
