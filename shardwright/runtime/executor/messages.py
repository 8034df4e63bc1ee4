"""Messages between pipeline stages: values of any shape and dtype in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwright.program.step.instructions import Recv, Send
from shardwright.program.step.message_buffer import buffer_layout
from shardwright.runtime.backend.base import Waited, wait_for
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.executor.transfers import InFlight


class MessageEnd(Protocol):
    """The end of one message of a program at this rank."""

    def send(self, values: Sequence[torch.Tensor | None], device: torch.device, /) -> InFlight:
        """Start to send values; None is zeros."""

    def receive(self, device: torch.device, /) -> InFlight:
        """Start to receive."""


class Messages:
    """Sends or receives messages of one form; `group` contains both ranks."""

    def __init__(self, message: Send | Recv, group: dist.ProcessGroup) -> None:
        self.message, self.text, self.group = message, str(message), group
        self.peer = 1 - dist.get_rank(group)
        self.backend = backend_of(group)
        self.shapes = [one.shape for one in message.payload]
        self.dtypes: list[torch.dtype] = [getattr(torch, one.dtype) for one in message.payload]
        self.starts, self.sizes, self.bytes = buffer_layout(message.payload)

    def send(self, values: Sequence[torch.Tensor | None], device: torch.device) -> InFlight:
        """Start to send values of the message's dtypes; None is zeros."""
        (first, *others) = values if values else (None,)
        if first is not None and not others and first.is_contiguous() and first.numel():
            buffer = first.reshape(-1).view(torch.uint8)
        else:
            buffer = torch.zeros(self.bytes, dtype=torch.uint8, device=device)
            for view, value in zip(self._views(buffer), values, strict=True):
                if value is not None:
                    view.copy_(value)
        work = self.backend.begin_send(self.group, buffer, self.peer)
        return _Started(work, self.text, buffer, [])

    def receive(self, device: torch.device) -> InFlight:
        """Start to receive."""
        buffer = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        work = self.backend.begin_receive(self.group, buffer, self.peer)
        return _Started(work, self.text, buffer, self._views(buffer))

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The values in a buffer, sharing its memory."""
        return [
            buffer[start : start + size].view(dtype).view(shape)
            for start, size, dtype, shape in zip(
                self.starts, self.sizes, self.dtypes, self.shapes, strict=True
            )
        ]


class _Started:
    """A message in flight; its `buffer` is in use until it was waited for."""

    def __init__(
        self, work: Waited, text: str, buffer: torch.Tensor, values: list[torch.Tensor]
    ) -> None:
        self._work, self._text, self._values = work, text, values
        self._buffer: torch.Tensor | None = buffer

    def results(self) -> list[torch.Tensor]:
        wait_for(self._work, self._text)
        self._buffer = None
        return self._values
