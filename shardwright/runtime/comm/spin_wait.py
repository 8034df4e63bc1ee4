"""Waits for asynchronous collectives; on CPU it spins instead of sleeping.

Gloo's threads send and receive, and the thread that waits for them sleeps. A core of a virtual
machine on which all sleep goes back to the host; until it is at work again takes as long as many
messages do. So who waits stays awake for some milliseconds, and yields the core to whoever has
work for it (ADR 0065).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_YIELDS = 50  # between two looks at the clocks
_LOOKS = 400  # together some 10 ms, if nobody else wants the core; longer waits sleep
_AWAKE_BYTES = 2**23  # more is work for Gloo's threads, which want a core for themselves


class Waited(Protocol):
    """A collective that is on its way."""

    def wait(self) -> object:
        """Until it is done."""


def wait_for(work: Waited, _what: str) -> None:
    """Wait; of a rank that stands still here `train/watchdog.py` tells what it waits for.

    The wait itself is no Python code of torch's, and so in no frame.
    """
    work.wait()


def reduce_over(
    group: dist.ProcessGroup, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """`x`, in place, becomes the sum of all ranks' of `group`, or what else `op` makes of them."""
    if dist.get_backend(group) == "gloo":
        wait_for(begun(group, x, op), "a sum")
    else:  # which keeps its order on the device
        dist.all_reduce(x, op, group)


def exchange_over(
    group: dist.ProcessGroup,
    found: torch.Tensor,
    given: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
) -> None:
    """Parts of `given`, along its first dimension, go to all ranks of `group`; theirs to `found`.

    They have so many rows, rank by rank.
    """
    sizes = list(received), list(sent)
    if dist.get_backend(group) == "gloo":
        work = dist.all_to_all_single(found, given, *sizes, group=group, async_op=True)
        wait_for(_on_its_way(group, given, work), "an exchange")
    else:
        dist.all_to_all_single(found, given, *sizes, group=group)


def begun(
    group: dist.ProcessGroup, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Waited:
    """The same on its way; `x` is the sum once it was waited for."""
    return _on_its_way(group, x, dist.all_reduce(x, op, group, async_op=True))


def begun_along(axes: Sequence[DeviceMesh], x: torch.Tensor) -> Waited:
    """The sum along all `axes`, of which the last one's is on its way."""
    *others, last = axes
    for axis in others:
        reduce_over(axis.get_group(), x)
    return begun(last.get_group(), x)


def _on_its_way(group: dist.ProcessGroup, x: torch.Tensor, work: dist.Work | None) -> Waited:
    """`work` on `x`, which is waited for awake where that helps."""
    assert work is not None
    small = x.numel() * x.element_size() <= _AWAKE_BYTES
    return _Awake(work) if small and dist.get_backend(group) == "gloo" else work


@final
class _Awake:
    """A collective of Gloo's threads that is waited for without sleep, as long as it is short."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Until it is done; raises what went wrong."""
        for _ in range(_LOOKS):
            start, ours = time.perf_counter(), time.process_time()
            for _ in range(_YIELDS):
                if self._work.is_completed():
                    self._work.wait()
                    return
                os.sched_yield()
            # Of time in which no thread of this rank runs others had the core, who want it.
            if time.perf_counter() - start > 2 * (time.process_time() - ours):
                break
        self._work.wait()
