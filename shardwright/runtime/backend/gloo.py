"""Gloo, which joins ranks on CPUs: its workarounds, and the tuning of the host that it can ask for.

Its threads send and receive. A collective that is not asynchronous blocks the calling thread inside
of torch, where nobody sees what is waited for; so all are begun, and then waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from shardwright.machine.backends import BACKENDS
from shardwright.runtime.backend.base import Backend, Op, Waited, begun, wait_for
from shardwright.runtime.backend.host_tuning import (
    AWAKE_BYTES,
    Awake,
    have_senders_take_turns,
    keep_freed_memory,
)

_TAG = 39  # keeps parts of gathers from other messages between the same two ranks


@final
class Gloo(Backend):
    """Collectives on CPUs."""

    def __init__(self) -> None:
        super().__init__(BACKENDS["gloo"])

    def reduce(self, group: dist.ProcessGroup, x: torch.Tensor, op: Op) -> None:
        wait_for(self.begin_reduce(group, x, op), "a sum")

    def begin_reduce(self, group: dist.ProcessGroup, x: torch.Tensor, op: Op) -> Waited:
        return self._waited(x, dist.all_reduce(x, op, group, async_op=True))

    def exchange(
        self,
        group: dist.ProcessGroup,
        found: torch.Tensor,
        given: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        wait_for(self.begin_exchange(group, found, given, received, sent), "an exchange")

    def begin_exchange(
        self,
        group: dist.ProcessGroup,
        found: torch.Tensor,
        given: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> Waited:
        sizes = list(received), list(sent)
        work = dist.all_to_all_single(found, given, *sizes, group=group, async_op=True)
        return self._waited(given, work)

    def begin_gather(self, group: dist.ProcessGroup, buffer: torch.Tensor, rank: int) -> Waited:
        # Gloo would gather in a buffer of its own, as large as this one, which its threads give
        # back some time later. So every rank sends its part to each other one.
        parts = buffer.view(-1).chunk(group.size())
        works: list[Waited] = []
        for hop in range(1, len(parts)):
            there, back = (rank + hop) % len(parts), (rank - hop) % len(parts)
            works.append(begun(dist.irecv(parts[back], group=group, tag=_TAG, group_src=back)))
            works.append(begun(dist.isend(parts[rank], group=group, tag=_TAG, group_dst=there)))
        return _Messages(works)

    def reduce_scatter(
        self, group: dist.ProcessGroup, own: torch.Tensor, given: torch.Tensor, rank: int
    ) -> None:
        wait_for(self.begin_reduce_scatter(group, own, given, rank), "sums of gradients")

    def begin_reduce_scatter(
        self, group: dist.ProcessGroup, own: torch.Tensor, given: torch.Tensor, rank: int
    ) -> Waited:
        # Gloo scatters a sum so itself, but makes a copy of what it is given before.
        return _PartOfSum(own, given, rank, self.begin_reduce(group, given, dist.ReduceOp.SUM))

    def tune_host(self) -> None:
        """Keep freed memory, schedule Gloo's threads as a batch, and wait without sleep.

        That is the whole process, until it ends: the allocator, the threads of all process groups
        that are there, and all waits for collectives from now on.
        """
        self.tuned = True
        keep_freed_memory()
        self.tune_new_groups()

    def tune_new_groups(self) -> None:
        if self.tuned:
            have_senders_take_turns()

    def _waited(self, x: torch.Tensor, work: dist.Work | None) -> Waited:
        """`work` on `x`, which is waited for awake where the host is tuned and that helps."""
        assert work is not None
        small = x.numel() * x.element_size() <= AWAKE_BYTES
        return Awake(work) if self.tuned and small else work


class _Messages:
    """Several messages between two ranks each."""

    def __init__(self, works: Sequence[Waited]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Return when all are there."""
        while self._works:
            self._works.pop(0).wait()


class _PartOfSum:
    """A rank's part of a sum that all ranks get whole."""

    def __init__(self, own: torch.Tensor, given: torch.Tensor, rank: int, work: Waited) -> None:
        self._own = own
        self._work: Waited | None = work
        self._part = given.narrow(0, rank * own.numel(), own.numel())

    def wait(self) -> None:
        """Return when the part is there."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        self._own.copy_(self._part)
