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
from shardwright.runtime.backend.base import Waited, wait_for
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.equal_ranks import all_equal
from shardwright.runtime.deferred.sources import all_tensors, sources_of
from shardwright.train.data.batch import Batch, JobError

_SAMPLED = 2**16  # about the most elements of a tensor in a digest, at equal distances


@final
class Consensus:
    """A small collective in each step, so that all ranks stop at the same step.

    SIGTERM on any rank stops all ranks after the next step. Batches that differ between ranks raise
    `JobError` at the end of the step. The exchange runs during the step and nobody waits for it.

    With `ahead` > 0 ranks exchange once in `ahead` steps and read the result `ahead` steps later.
    They stop, or raise the error, up to twice as many steps late.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.asked = False
        self.ahead = ahead
        self._calls, self._seen = 0, 0
        self._exchange: tuple[Waited, torch.Tensor, int, str] | None = None
        self._stops: bool | None = None  # what the last exchange said, if nobody has asked for it
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        # The default one if it is Gloo's, which waits for no kernel.
        self._group = None if self._alone else dist.group.WORLD
        if not self._alone and (ahead or dist.get_backend() != "gloo"):
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)

    def may_go_on(self) -> bool:
        """Whether no rank received a signal to stop; every rank calls it before each step.

        With `ahead` it also raises `JobError` if the batches of earlier steps differed.
        """
        if self._alone:
            return not self.asked
        if not self.ahead:
            if self._stops is None:
                self._begin("no step", 0)
                self.settle()
            stops, self._stops = self._stops, None
            return not stops
        self._calls += 1
        if (self._calls - 1) % self.ahead:
            return True
        self._finish()
        self._begin("one of the last steps", self._seen)
        stops, self._stops = self._stops, None
        return not stops

    def check_batches(self, step: int, batches: Sequence[Batch]) -> None:
        """Compare the batches of `step` with those of other ranks; `settle` has the outcome.

        With `ahead` only a checksum is updated, which a later `may_go_on` compares.
        """
        if self._alone:
            return
        seen = digest(batches)
        if self.ahead:
            self._seen = zlib.crc32(str((self._seen, seen)).encode())
        else:
            self._begin(f"step {step}", seen)

    def settle(self) -> None:
        """End the exchange of this step; raises `JobError`, naming a rank, for other batches."""
        if not self.ahead:
            self._finish()

    def _begin(self, when: str, seen: int) -> None:
        """Begin to exchange who was asked to stop, and the checksum of batches."""
        exchanged = torch.tensor([int(self.asked), seen, -seen])
        assert self._group is not None, "several ranks"
        backend = backend_of(self._group)
        work = backend.begin_reduce(self._group, exchanged, dist.ReduceOp.MAX)
        self._exchange = work, exchanged, seen, when

    def _finish(self) -> None:
        """Wait for the exchange in flight, if there is one."""
        if self._exchange is None:
            return
        work, exchanged, seen, when = self._exchange
        self._exchange = None
        wait_for(work, "what the other ranks were asked")
        asked, largest, smallest = exchanged.tolist()
        if largest != -smallest:
            self._raise_difference(when, seen)
        self._stops = bool(asked)

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
    if all_equal(mine, (dist.group.WORLD,)):
        return
    every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    for rank, found in enumerate(every):
        for what, value in found.items():
            if value != every[0][what]:
                raise JobError(
                    f"rank {rank} has {what} {value}, rank 0 has {every[0][what]}; give all hosts"
                    " the same software, plan and seeds"
                )
