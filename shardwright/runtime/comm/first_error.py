"""Records the error of the first rank that fails, for the ranks that only see a broken connection.

Neighbouring stages send each other their errors (`channel`). Ranks that share a stage wait for each
other in collectives, which fail when a process ends but do not report its error. So the error is
written to the store with which the process group was initialised.
"""

from __future__ import annotations

import time
from typing import final

import torch.distributed as dist

_PATIENCE = 15.0  # seconds; a rank that lost its neighbour writes at its next receive


@final
class FirstErrorRecord:
    """One text for all ranks; the first text written is kept. Every rank must construct it."""

    def __init__(self) -> None:
        numbers = [0] * dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None, "there is a process group"
        self.store = group.get_group_store()
        if dist.get_rank() == 0:
            numbers[0] = self.store.add("shardwright/boards", 1)
        dist.broadcast_object_list(numbers, src=0)
        self.key = f"shardwright/boards/{numbers[0]}"

    def write(self, text: str) -> str:
        """Record this rank's error unless another rank was first; return the recorded error."""
        try:
            return str(self.store.compare_set(self.key, "", text).decode())
        except RuntimeError:  # the process that has the store is gone
            return text

    def read(self, patience: float = _PATIENCE) -> str:
        """The error of the first rank that failed; empty if none came in `patience` seconds."""
        end = time.monotonic() + patience
        try:
            while True:
                if self.store.check([self.key]):
                    return str(self.store.get(self.key).decode())
                if time.monotonic() >= end:
                    return ""
                time.sleep(0.05)
        except RuntimeError:
            return ""


def is_broken_link(error: BaseException) -> bool:
    """Whether a collective failed because another process ended."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
