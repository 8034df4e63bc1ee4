"""Point-to-point messages between neighbouring stages, with one receive posted ahead.

Each boundary has two channels, one for values and one for gradients, each with a process group of
its two ranks, so that none blocks another. A message is one flat buffer of a size that both ends
know:

    status, text of an error | tensor | tensor | …   (each on a multiple of 64 bytes)

Where the backend can, the next message is received while the stage computes with the current one.
It is a mini-batch, the token that ends a drain, or the error of a stage that failed, so every
posted receive is matched by a send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardwright.program.step.message_buffer import ALIGNMENT
from shardwright.runtime.backend.registry import backend_of

_HEADER = 512
_TEXT = slice(8, _HEADER)
_DATA, _TOKEN, _FAILED = 0, 1, 2
_TELLING = timedelta(seconds=15)  # to send an error; the peer has already posted a receive


class StageFailed(RuntimeError):  # noqa: N818 - what happened, to another stage
    """Another stage of the pipeline failed, or its process is gone; the message says which."""


@dataclass(frozen=True)
class MessageForm:
    """Shapes and dtypes of the tensors of a channel's messages."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def starts(self) -> list[int]:
        """The start of each tensor in a message, and the end of the message."""
        sizes = (
            -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return list(accumulate(sizes, initial=_HEADER))

    def views(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a message, sharing its memory."""
        return [
            message[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in zip(self.starts(), self.shapes, self.dtypes, strict=False)
        ]


@dataclass(eq=False)
class SentMessage:
    """A message under way, whose memory is in use until it was waited for."""

    channel: Channel
    message: torch.Tensor
    works: list[Any]

    def results(self) -> list[torch.Tensor]:
        """Wait for it; nothing results."""
        self.channel.end_of(self)
        return []


@dataclass
class Channel:
    """One direction between this rank and the rank `peer`, of stage `stage`.

    All its messages are as large as one of `form`.
    """

    form: MessageForm
    peer: int
    stage: int
    group: Any
    device: torch.device
    timeout: timedelta
    under_way: deque[SentMessage] = field(default_factory=deque)
    coming: tuple[torch.Tensor, list[Any]] | None = None
    lost: bool = False  # the peer failed or is gone: it reads nothing any more

    @property
    def ahead(self) -> bool:
        """Whether a receive may be posted before its message is needed."""
        return backend_of(self.group).receives_ahead

    def send(self, form: MessageForm, tensors: Sequence[torch.Tensor | None]) -> SentMessage:
        """Begin to send data of a `form` that is no larger than the channel's; None is zeros."""
        message = self._message(_DATA)
        for view, tensor in zip(form.views(message), tensors, strict=True):
            view.zero_() if tensor is None else view.copy_(tensor)
        return self._begin(message)

    def send_token(self) -> None:
        """Send the end token, and wait until all messages are sent."""
        self._begin(self._message(_TOKEN))
        while self.under_way:
            self.under_way[0].results()

    def send_failure(self, text: str) -> bool:
        """Report that a stage failed; False if the peer cannot be reached, as it has ended."""
        message = self._message(_FAILED)
        raw = text.encode()[: _HEADER - _TEXT.start - 1]
        message[_TEXT.start : _TEXT.start + len(raw)] = torch.frombuffer(
            bytearray(raw), dtype=torch.uint8
        ).to(self.device)
        try:
            self._wait(self._begin(message).works, _TELLING)
        except StageFailed:
            return False
        return True

    def begin_receive(self) -> None:
        """Begin to receive the next message, unless that has begun already."""
        if self.coming is None:
            message = torch.empty(self.form.starts()[-1], dtype=torch.uint8, device=self.device)
            self.coming = message, self._start((), (message,))

    def receive(self, form: MessageForm, *, ahead: bool) -> list[torch.Tensor]:
        """The next data, of `form`; `ahead` begins to receive the message after it."""
        message, status = self._receive()
        assert status == _DATA, "a stage sent a token where a mini-batch is due"
        if ahead and self.ahead:
            self.begin_receive()
        return form.views(message)

    def receive_token(self) -> None:
        """Wait until the peer says that it is done."""
        _, status = self._receive()
        assert status == _TOKEN, "a stage sent a mini-batch where a token is due"

    def _receive(self) -> tuple[torch.Tensor, int]:
        self.begin_receive()
        assert self.coming is not None
        message, works = self.coming
        self._wait(works)
        self.coming = None
        status = int(message[:8].view(torch.int64))
        if status == _FAILED:
            text = bytes(message[_TEXT].cpu().tolist()).rstrip(b"\0").decode(errors="replace")
            self.lost = True
            raise StageFailed(text)
        return message, status

    def _message(self, status: int) -> torch.Tensor:
        message = torch.empty(self.form.starts()[-1], dtype=torch.uint8, device=self.device)
        message[:_HEADER] = 0
        message[:8].view(torch.int64).fill_(status)
        return message

    def _begin(self, message: torch.Tensor) -> SentMessage:
        sent = SentMessage(self, message, self._start((message,), ()))
        self.under_way.append(sent)
        return sent

    def end_of(self, sent: SentMessage) -> None:
        """Wait until a message was sent."""
        self._wait(sent.works)
        self.under_way.remove(sent)

    def _start(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> list[Any]:
        peer = dist.get_group_rank(self.group, self.peer)
        pairs = ([(peer, message) for message in messages] for messages in (sends, receives))
        try:
            return list(backend_of(self.group).begin_messages(self.group, *pairs))
        except RuntimeError as e:
            raise self._gone(e) from e

    def _wait(self, works: list[Any], timeout: timedelta | None = None) -> None:
        try:
            for work in works:
                work.wait(timeout or self.timeout)
        except RuntimeError as e:
            raise self._gone(e) from e

    def _gone(self, error: RuntimeError) -> StageFailed:
        self.lost = True
        return StageFailed(
            f"stage {self.stage} (rank {self.peer}) is gone or has not answered for"
            f" {self.timeout.total_seconds():.0f} s: {str(error).splitlines()[0]}"
        )
