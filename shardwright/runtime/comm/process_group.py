"""In-place collectives on tensors over a process group, run by its `Backend`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.runtime.backend.base import Op, Waited
from shardwright.runtime.backend.registry import backend_of


def reduce_over(group: dist.ProcessGroup, x: torch.Tensor, op: Op = dist.ReduceOp.SUM) -> None:
    """All-reduces `x` in place over the ranks of `group`; `op` is a sum by default."""
    backend_of(group).reduce(group, x, op)


def begun(group: dist.ProcessGroup, x: torch.Tensor, op: Op = dist.ReduceOp.SUM) -> Waited:
    """The same, asynchronous; `x` is the sum once it was waited for."""
    return backend_of(group).begin_reduce(group, x, op)


def exchange_over(
    group: dist.ProcessGroup,
    found: torch.Tensor,
    given: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
) -> None:
    """All-to-all over `group` of rows of `given` into `found`.

    `sent` and `received` are the numbers of rows for and from each rank.
    """
    backend_of(group).exchange(group, found, given, received, sent)


def gather_into(buffer: torch.Tensor, group: dist.ProcessGroup, rank: int) -> Waited:
    """Begins an all-gather of equal parts of `buffer`; this rank's part is filled in already.

    The buffer is contiguous, and its elements a multiple of the ranks.
    """
    return backend_of(group).begin_gather(group, buffer, rank)
