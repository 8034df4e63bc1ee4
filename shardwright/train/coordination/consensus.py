"""Makes ranks stop at the same step, and checks that their batches and setup are equal."""

from __future__ import annotations

import platform
import signal
import threading
import zlib
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist

from shardwright.ir.plan import Plan
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.backend.base import wait_for
from shardwright.runtime.deferred.sources import all_tensors, sources_of
from shardwright.train.data.batch import Batch, JobError

_SAMPLED = 2**16  # about the most elements of a tensor in a digest, at equal distances


@final
class Consensus:
    """Small collectives before each step, so that all ranks stop at the same step.

    SIGTERM on any rank stops all ranks. Batches that differ between ranks raise `JobError`, without
    `ahead` before the step.

    With `ahead` > 0 ranks exchange once in `ahead` steps, asynchronously, and read the result
    `ahead` steps later, so that they rarely wait for each other. They stop, or raise the error, up
    to twice as many steps late.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.asked = False
        self.ahead = ahead
        self._calls, self._seen = 0, 0
        self._exchange: tuple[dist.Work, torch.Tensor, int] | None = None
        self._group = None  # the default one; on GPUs one of gloo, which waits for no kernel
        if dist.is_initialized() and (ahead or dist.get_backend() != "gloo"):
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)

    def may_go_on(self) -> bool:
        """Whether no rank received a signal to stop; every rank calls it before each step.

        With `ahead` it also raises `JobError` if the batches of earlier steps differed.
        """
        if not self.ahead or not dist.is_initialized():
            return not self._largest(int(self.asked))[0]
        self._calls += 1
        if (self._calls - 1) % self.ahead:
            return True
        goes_on = self._last_exchange()
        exchanged = torch.tensor([int(self.asked), self._seen, -self._seen])
        work = dist.all_reduce(exchanged, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._exchange = work, exchanged, self._seen
        return goes_on

    def _last_exchange(self) -> bool:
        """Whether no rank had received a signal to stop at the last exchange."""
        if self._exchange is None:
            return True
        work, exchanged, seen = self._exchange
        self._exchange = None
        wait_for(work, "what the other ranks were asked")
        asked, largest, smallest = exchanged.tolist()
        if largest != -smallest:
            self._raise_difference("one of the last steps", seen)
        return not asked

    def check_batches(self, step: int, batches: Sequence[Batch]) -> None:
        """Raise `JobError`, naming a rank, if ranks have different batches for `step`.

        With `ahead` only a checksum is updated, which a later `may_go_on` compares.
        """
        seen = digest(batches)
        if self.ahead:
            self._seen = zlib.crc32(str((self._seen, seen)).encode())
            return
        largest, smallest = self._largest(seen, -seen)
        if largest != -smallest:
            self._raise_difference(f"step {step}", seen)

    def _raise_difference(self, when: str, seen: int) -> None:
        """Raise `JobError`, naming a rank whose batches differ from those of rank 0."""
        every: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(every, seen, group=self._group)
        other = next(rank for rank, found in enumerate(every) if found != every[0])
        raise JobError(
            f"the batches of {when} are not the same on rank {other} as on rank 0; make"
            " Job.data give the same on every rank: the same files, the same order, the same"
            " seeds"
        )

    def _largest(self, *mine: int) -> list[int]:
        """The largest of each number over all ranks."""
        if not dist.is_initialized():
            return list(mine)
        exchanged = torch.tensor(mine)
        dist.all_reduce(exchanged, dist.ReduceOp.MAX, group=self._group)
        found: list[int] = exchanged.tolist()
        return found

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked = True


def digest(value: Any) -> int:
    """A checksum of 32 bits of tensors, and of lists, tuples and mappings of them.

    Of large tensors only a sample of the elements counts.

    >>> digest([torch.zeros(3)]) == digest([torch.zeros(3)]) != digest([torch.ones(3)])
    True
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)
        part = flat[:: max(1, len(flat) // _SAMPLED)].cpu().contiguous()
        data = part.view(torch.uint8).numpy().tobytes() if len(part) else b""
        return zlib.crc32(data, zlib.crc32(str((value.dtype, tuple(value.shape))).encode()))
    if isinstance(value, Mapping):
        return zlib.crc32(repr([(str(k), digest(v)) for k, v in value.items()]).encode())
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([digest(v) for v in value]).encode())
    return zlib.crc32(repr(value).encode())


def check_same_setup(plan: Plan, model: torch.nn.Module) -> None:
    """Raise `JobError`, naming a rank, unless all ranks have equal software, plan and weights.

    Software is the versions of Python, torch and numpy. Plans and weights are compared by checksums
    (`digest`); the weights of a model without memory by their sources.
    """
    if not dist.is_initialized():
        return
    import numpy

    sources = sources_of(model)
    mine = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "plan": zlib.crc32(plan_to_json(plan).encode()),
        "weights": digest(dict(model.state_dict()))
        if sources is None
        else sources.digest(all_tensors(model)),
    }
    every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    for rank, found in enumerate(every):
        for what, value in found.items():
            if value != every[0][what]:
                raise JobError(
                    f"rank {rank} has {what} {value}, rank 0 has {every[0][what]}; give all hosts"
                    " the same software, plan and seeds"
                )
