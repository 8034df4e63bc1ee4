"""The backend Gloo for ranks on CPUs: its workarounds, and optional tuning of the host.

Gloo's own threads send and receive. A synchronous collective would block the calling thread inside
of torch, where the watchdog cannot see which collective it waits for; so all collectives are
started asynchronously and then waited for.

A message waits as long as its group was made for, whatever `ProcessGroup.set_timeout` says, unless
its wait is given a time; so the times that were set are kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwright.machine.backends import BACKENDS
from shardwright.runtime.backend.base import Backend, Messages, Op, Waited, begun, wait_for
from shardwright.runtime.backend.host_tuning import (
    SPIN_BYTES,
    SpinningWait,
    have_senders_take_turns,
    keep_freed_memory,
)

# These keep gathers and scattered sums from other messages between the same two ranks.
_GATHER_TAG, _SUM_TAG = 39, 40


@final
class Gloo(Backend):
    """Collectives on CPUs."""

    receives_ahead = True
    orders_on_device = False

    def __init__(self) -> None:
        super().__init__(BACKENDS["gloo"])
        self._timeouts: WeakKeyDictionary[dist.ProcessGroup, timedelta] = WeakKeyDictionary()

    def set_timeout(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().set_timeout(group, timeout)
        self._timeouts[group] = timeout

    def begin_send(
        self, group: dist.ProcessGroup, x: torch.Tensor, peer: int, tag: int = 0
    ) -> Waited:
        work = begun(dist.isend(x, group=group, tag=tag, group_dst=peer))
        return _Message(work, self._timeouts.get(group))

    def begin_receive(
        self, group: dist.ProcessGroup, x: torch.Tensor, peer: int, tag: int = 0
    ) -> Waited:
        work = begun(dist.irecv(x, group=group, tag=tag, group_src=peer))
        return _Message(work, self._timeouts.get(group))

    def begin_messages(
        self, group: dist.ProcessGroup, sends: Messages, receives: Messages
    ) -> list[Waited]:
        timeout = self._timeouts.get(group)
        return [_Message(one, timeout) for one in super().begin_messages(group, sends, receives)]

    def reduce(self, group: dist.ProcessGroup, x: torch.Tensor, op: Op = dist.ReduceOp.SUM) -> None:
        wait_for(self.begin_reduce(group, x, op), "a sum")

    def begin_reduce(
        self, group: dist.ProcessGroup, x: torch.Tensor, op: Op = dist.ReduceOp.SUM
    ) -> Waited:
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
        # Gloo's all-gather allocates another buffer of this size, which its threads free later.
        # So every rank sends its part to each other rank instead.
        parts = buffer.view(-1).chunk(group.size())
        works: list[Waited] = []
        for hop in range(1, len(parts)):
            there, back = (rank + hop) % len(parts), (rank - hop) % len(parts)
            works.append(self.begin_receive(group, parts[back], back, _GATHER_TAG))
            works.append(self.begin_send(group, parts[rank], there, _GATHER_TAG))
        return _Messages(works)

    def begin_reduce_scatter(
        self, group: dist.ProcessGroup, own: torch.Tensor, given: torch.Tensor, rank: int
    ) -> Waited:
        # Gloo's own reduce-scatter is an all-reduce, which sends twice the bytes. So every rank
        # sends each other rank the terms of its part.
        parts = given.view(-1).chunk(group.size())
        received = [own, *(torch.empty_like(own) for _ in parts[2:])]
        works: list[Waited] = []
        for hop, term in enumerate(received[: len(parts) - 1], 1):
            there, back = (rank + hop) % len(parts), (rank - hop) % len(parts)
            works.append(self.begin_receive(group, term, back, _SUM_TAG))
            works.append(self.begin_send(group, parts[there], there, _SUM_TAG))
        if not works:
            own.copy_(given)
            return _Messages(works)
        return _SumOfTerms(own, [*received[1:], parts[rank]], _Messages(works))

    def tune_host(self) -> None:
        """Keep freed memory, schedule Gloo's threads as `SCHED_BATCH`, and spin in short waits.

        This affects the whole process until it ends: the allocator, the threads of all existing
        process groups, and all later waits for collectives.
        """
        self.tuned = True
        keep_freed_memory()
        self.tune_new_groups()

    def tune_new_groups(self) -> None:
        if self.tuned:
            have_senders_take_turns()

    def _waited(self, x: torch.Tensor, work: dist.Work | None) -> Waited:
        """`work` on `x`, with a spinning wait if the host is tuned and the message is small."""
        assert work is not None
        small = x.numel() * x.element_size() <= SPIN_BYTES
        return SpinningWait(work) if self.tuned and small else work


class _Message:
    """A message between two ranks, whose wait fails after `timeout`, or after the group's."""

    def __init__(self, work: Any, timeout: timedelta | None) -> None:
        self._work, self._timeout = work, timeout

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when it is there."""
        given = timeout or self._timeout
        self._work.wait() if given is None else self._work.wait(given)


class _Messages:
    """Several messages between two ranks each."""

    def __init__(self, works: Sequence[Waited]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Return when all are there."""
        while self._works:
            self._works.pop(0).wait()


class _SumOfTerms:
    """A reduce-scatter by messages: one term arrives in `own`, to which the others are added."""

    def __init__(self, own: torch.Tensor, terms: list[torch.Tensor], messages: _Messages) -> None:
        self._own, self._terms, self._messages = own, terms, messages

    def wait(self) -> None:
        """Return when the sum is in `own`."""
        self._messages.wait()
        while self._terms:
            self._own.add_(self._terms.pop(0))
