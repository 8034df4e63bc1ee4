"""Runs the transfers of a step program: asynchronous collectives on buckets of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwright.program.step.instructions import Transfer
from shardwright.runtime.comm.collectives import Arriving, Bucket
from shardwright.runtime.comm.local_moves import moved_locally


class InFlight(Protocol):
    """A transfer that was started."""

    def results(self) -> list[torch.Tensor]:
        """Wait until it is done; the results of its parts, in order, shaped as they are."""


class Collectives:
    """Starts one transfer on the devices along its channel's axis, once per step or more often."""

    def __init__(self, transfer: Transfer, group: dist.ProcessGroup, rank: int) -> None:
        self.transfer, self.text = transfer, str(transfer)
        self.bucket = Bucket([part.move for part in transfer.parts], group, rank)
        self.dtypes: list[torch.dtype] = [getattr(torch, part.dtype) for part in transfer.parts]
        self.wires = [self.bucket.backend.wire_dtype(dtype) for dtype in self.dtypes]

    def start(self, values: Sequence[torch.Tensor], owned: Sequence[bool]) -> InFlight:
        """Begin the transfer of `values`, without autograd; nothing else reads those `owned`."""
        given, mine = [], []
        for part, x, dtype, wire, own in zip(
            self.transfer.parts, values, self.dtypes, self.wires, owned, strict=True
        ):
            y = x if x.dtype is dtype else x.to(dtype)
            if y.shape != part.atoms:
                y = y.reshape(part.atoms)
            if part.local:
                y = moved_locally(y, part.local)
            copied = y is not x and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            mine.append(own or copied)
            given.append(y if dtype is wire else y.to(wire))
        return _InFlight(self.bucket.start(given, mine), self)


class _InFlight:
    def __init__(self, arriving: Arriving, started_by: Collectives) -> None:
        self._arriving, self._started_by = arriving, started_by

    def results(self) -> list[torch.Tensor]:
        found = self._arriving.results(self._started_by.text)
        parts, dtypes = self._started_by.transfer.parts, self._started_by.dtypes
        for i, (part, dtype) in enumerate(zip(parts, dtypes, strict=True)):
            x = found[i]
            if x.shape != part.shape or x.dtype is not dtype:
                found[i] = x.reshape(part.shape).to(dtype)
        return found


def alone_in_memory(tensors: Sequence[torch.Tensor | None]) -> set[int]:
    """The ids of the tensors that alone use the whole of a storage, contiguously."""
    first: dict[int, int] = {}  # memory -> the only tensor in it, 0 where there are several
    for x in tensors:
        if x is not None:
            storage = x.untyped_storage()
            memory = storage.data_ptr()
            if memory in first:
                first[memory] = 0
            elif storage.nbytes() == x.nbytes and x.is_contiguous():
                first[memory] = id(x)
            else:
                first[memory] = 0
    return set(first.values())
