"""Links of a stage to its neighbours on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.program.lower.pipeline import Crossing, StagedGraph
from shardwright.runtime.async_pipeline.stage import Tensors
from shardwright.runtime.comm.channel import Channel, MessageForm


@dataclass(frozen=True)
class Seat:
    """The position of this rank: its stage, its index in the stage's group, and its neighbours.

    `ranks` has, per stage, the rank at the same index; `others` are the ranks of this stage.
    """

    stage: int
    place: int
    ranks: tuple[int, ...]
    others: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f" (rank {self.ranks[self.stage]})" if self.others else ""
        return f"stage {self.stage}{where}"

    @property
    def company(self) -> str:
        """Those that share the stage."""
        ranks = ", ".join(map(str, self.others))
        return f"stage {self.stage} ({'one of ranks' if self.others[1:] else 'rank'} {ranks})"


class StageLinks:
    """Four channels: to and from the ranks with this index in the previous and the next stage."""

    def __init__(
        self, staged: StagedGraph, seat: Seat, device: torch.device, timeout: timedelta
    ) -> None:
        stage, stages = seat.stage, len(staged.parts)
        self.lag = stages - stage - 1
        self.is_open = False
        groups = [dist.new_group() for _ in range(2)]
        for group in groups:
            dist.barrier(group=group)  # connects all ranks, before any of them sends
        values, gradients = groups

        def channel(form: MessageForm, peer: int, group: Any) -> Channel:
            return Channel(form, seat.ranks[peer], peer, group, device, timeout)

        self.values_in = self.values_out = self.gradients_in = self.gradients_out = None
        if stage > 0:
            forward, backward = _forms(staged, stage - 1, seat.place)
            self.values_in = channel(forward, stage - 1, values)
            self.gradients_out = channel(backward, stage - 1, gradients)
        if stage < stages - 1:
            forward, backward = _forms(staged, stage, seat.place)
            self.values_out = channel(forward, stage + 1, values)
            self.gradients_in = channel(backward, stage + 1, gradients)

    def open(self) -> None:
        """Start to receive from both neighbours."""
        self.is_open = True
        for channel in (self.values_in, self.gradients_in):
            if channel is not None:
                channel.begin_receive()

    def close(self) -> None:
        """Pass a token to the last stage and back, which ends when all stages are done."""
        if not self.is_open:
            return
        if self.values_in is not None:
            self.values_in.receive_token()
        if self.values_out is not None:
            self.values_out.send_token()
        if self.gradients_in is not None:
            self.gradients_in.receive_token()
        if self.gradients_out is not None:
            self.gradients_out.send_token()
        self.is_open = False

    def fail(self, text: str) -> None:
        """Send the error to both neighbours, which are waiting for a message."""
        before, behind = (self.values_in, self.gradients_out), (self.gradients_in, self.values_out)
        for receiving, sending in (before, behind):
            if sending is None or receiving is None or sending.lost or receiving.lost:
                continue
            sending.send_failure(text)

    def send_values(self, values: Tensors) -> None:
        assert self.values_out is not None
        self.values_out.send(values, keep=self.lag + 1)

    def receive_values(self) -> Tensors:
        assert self.values_in is not None
        return self.values_in.receive()[0]

    def send_gradients(self, gradients: Tensors, loss: torch.Tensor) -> None:
        assert self.gradients_out is not None
        self.gradients_out.send(gradients, float(loss), keep=self.lag + 1)

    def receive_gradients(self) -> tuple[Tensors, torch.Tensor]:
        assert self.gradients_in is not None
        gradients, loss = self.gradients_in.receive()
        return gradients, torch.tensor(loss, dtype=torch.float64)

    def receive_once(self) -> Tensors:
        """Receive values without posting a receive for a next message."""
        assert self.values_in is not None
        return self.values_in.receive(ahead=False)[0]

    def return_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Send the last stage's loss back to the first stage."""
        if loss is None:
            assert self.gradients_in is not None
            _, number = self.gradients_in.receive(ahead=False)
            loss = torch.tensor(number, dtype=torch.float64)
        if (channel := self.gradients_out) is not None:
            zeros = [
                torch.zeros(shape, dtype=dtype)
                for shape, dtype in zip(channel.form.shapes, channel.form.dtypes, strict=True)
            ]
            channel.send(zeros, float(loss), keep=0)
        return loss


def _forms(staged: StagedGraph, stage: int, place: int) -> tuple[MessageForm, MessageForm]:
    """Of the messages from `place` of a stage to the next and back: values, gradients."""
    values = staged.crossing(stage, 0, place)
    return _form(values), _form([value for value in values if value.differentiable])


def _form(values: Sequence[Crossing]) -> MessageForm:
    dtypes = tuple(getattr(torch, value.dtype) for value in values)
    return MessageForm(tuple(value.shape for value in values), dtypes)
