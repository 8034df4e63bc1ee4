"""`Backend`: how collectives run on one library of `torch.distributed`.

The base class is for NCCL, which orders collectives on streams of the device, so that also a
synchronous call blocks no thread of the host. Other backends override the methods that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shardwright.machine.backends import BackendSpec

# The names from torch 2.13 on, or else the older names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
Op = dist.ReduceOp.RedOpType
Messages = Sequence[tuple[int, torch.Tensor]]  # the other rank, and what is sent or received


class Waited(Protocol):
    """An asynchronous collective."""

    def wait(self) -> object:
        """Return when it is done."""


def wait_for(work: Waited, _what: str) -> None:
    """Wait; `train/coordination/watchdog.py` reads the argument from this frame of a hung rank.

    The wait of torch runs in C++ and has no Python frame.
    """
    work.wait()


class Backend:
    """The collectives of one backend; all tensors are contiguous."""

    tuned = False  # whether `tune_host` has changed allocator, scheduling and waits
    # Whether a receive may be posted long before its message is sent. Under NCCL it is a kernel
    # that runs until then, and whoever waits for the whole device waits for the other rank.
    receives_ahead = False
    orders_on_device = True  # whether collectives are kernels in streams, as of NCCL

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which tensors of `dtype` are sent.

        Backends support few integer types; the others are sent as wider ones, in which sums wrap
        around to the same results.
        """
        return _WIDER.get(dtype, dtype)

    def reduce(self, group: dist.ProcessGroup, x: torch.Tensor, op: Op = dist.ReduceOp.SUM) -> None:
        """All-reduce `x` in place; work on the device that is issued next sees the result."""
        dist.all_reduce(x, op, group)

    def begin_reduce(
        self, group: dist.ProcessGroup, x: torch.Tensor, op: Op = dist.ReduceOp.SUM
    ) -> Waited:
        """Start to all-reduce `x` in place, which is the result once it was waited for."""
        return begun(dist.all_reduce(x, op, group, async_op=True))

    def exchange(
        self,
        group: dist.ProcessGroup,
        found: torch.Tensor,
        given: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        """All-to-all of rows of `given` into `found`; the numbers of rows are by rank."""
        dist.all_to_all_single(found, given, list(received), list(sent), group=group)

    def begin_exchange(
        self,
        group: dist.ProcessGroup,
        found: torch.Tensor,
        given: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> Waited:
        """Start the all-to-all of `exchange`; `given` is read until it was waited for."""
        sizes = list(received), list(sent)
        return begun(dist.all_to_all_single(found, given, *sizes, group=group, async_op=True))

    def begin_send(self, group: dist.ProcessGroup, x: torch.Tensor, peer: int) -> Waited:
        """Begin to send `x` to a rank of the group; it is read until it was waited for."""
        return begun(dist.isend(x, group=group, group_dst=peer))

    def begin_receive(self, group: dist.ProcessGroup, x: torch.Tensor, peer: int) -> Waited:
        """Begin to receive `x` from a rank of the group."""
        return begun(dist.irecv(x, group=group, group_src=peer))

    def begin_messages(
        self, group: dist.ProcessGroup, sends: Messages, receives: Messages
    ) -> list[Waited]:
        """Begin to send and to receive tensors, in one batch; each with the rank in the group."""
        operations = [
            dist.P2POp(how, x, group=group, group_peer=peer)
            for how, given in ((dist.isend, sends), (dist.irecv, receives))
            for peer, x in given
        ]
        return [begun(work) for work in dist.batch_isend_irecv(operations)] if operations else []

    def begin_gather(self, group: dist.ProcessGroup, buffer: torch.Tensor, rank: int) -> Waited:
        """Begin an all-gather of parts of `buffer`, in place; part `rank` is this rank's own."""
        own = buffer.view(-1).chunk(group.size())[rank]
        return begun(all_gather_single(buffer.view(-1), own, group=group, async_op=True))

    def begin_reduce_scatter(
        self, group: dist.ProcessGroup, own: torch.Tensor, given: torch.Tensor, rank: int
    ) -> Waited:
        """Begin to write part `rank` of the sum of `given` to `own`; `given` stays as it is."""
        del rank  # the library knows it
        if given.is_complex():  # which torch does for every other collective
            own, given = torch.view_as_real(own), torch.view_as_real(given)
        return begun(reduce_scatter_single(own, given, group=group, async_op=True))

    def set_timeout(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        """Let what is begun in `group` from now on fail after `timeout`."""
        group.set_timeout(timeout)

    def tune_host(self) -> None:
        """Tune allocator, scheduling and waits of this process for speed; here a no-op."""

    def tune_new_groups(self) -> None:
        """Tune process groups made since the host was tuned; nothing if it was not."""


def begun(work: dist.Work | None) -> Waited:
    """The handle of an asynchronous collective; the rank must be a member of its group."""
    assert work is not None
    return work
