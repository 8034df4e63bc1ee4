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

    `chains` has, per index, the rank of each stage; `others` are the other ranks of this stage.
    """

    stage: int
    place: int
    chains: tuple[tuple[int, ...], ...]
    others: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage with this rank's index."""
        return self.chains[self.place]

    def __str__(self) -> str:
        where = f" (rank {self.ranks[self.stage]})" if self.others else ""
        return f"stage {self.stage}{where}"

    @property
    def company(self) -> str:
        """Those that share the stage."""
        ranks = ", ".join(map(str, self.others))
        return f"stage {self.stage} ({'one of ranks' if self.others[1:] else 'rank'} {ranks})"


class StageLinks:
    """Four channels: to and from the ranks with this index in the previous and the next stage.

    Each has a process group of its two ranks: under NCCL a message waits for all that were begun
    before it in its group, so channels that share one can wait for each other in a circle.
    """

    def __init__(
        self, staged: StagedGraph, seat: Seat, device: torch.device, timeout: timedelta
    ) -> None:
        stage, stages = seat.stage, len(staged.parts)
        self.lag = stages - stage - 1
        self.is_open = False

        groups = [(_pairs(seat, k), _pairs(seat, k)) for k in range(stages - 1)]

        def channel(form: MessageForm, peer: int, group: Any) -> Channel:
            dist.barrier(group=group)  # connects both, before any of them sends
            return Channel(form, seat.ranks[peer], peer, group, device, timeout)

        self.values_in = self.values_out = self.gradients_in = self.gradients_out = None
        if stage > 0:
            forward, backward = _forms(staged, stage - 1, seat.place)
            values, gradients = groups[stage - 1]
            self.values_in = channel(forward, stage - 1, values)
            self.gradients_out = channel(backward, stage - 1, gradients)
        if stage < stages - 1:
            forward, backward = _forms(staged, stage, seat.place)
            values, gradients = groups[stage]
            self.values_out = channel(forward, stage + 1, values)
            self.gradients_in = channel(backward, stage + 1, gradients)

    def open(self) -> None:
        """Start to receive from both neighbours, where that does not keep the device waiting."""
        self.is_open = True
        for channel in (self.values_in, self.gradients_in):
            if channel is not None and channel.ahead:
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


def _pairs(seat: Seat, stage: int) -> Any:
    """New groups of each rank of a stage and its neighbour of the next, on all ranks; this rank's.

    All ranks make all groups in one order, as NCCL needs where it splits them off another one.
    """
    return dist.new_subgroups_by_enumeration([list(c[stage : stage + 2]) for c in seat.chains])[0]


def _forms(staged: StagedGraph, stage: int, place: int) -> tuple[MessageForm, MessageForm]:
    """Of the messages from `place` of a stage to the next and back: values, gradients."""
    values = staged.crossing(stage, 0, place)
    return _form(values), _form([value for value in values if value.differentiable])


def _form(values: Sequence[Crossing]) -> MessageForm:
    dtypes = tuple(getattr(torch, value.dtype) for value in values)
    return MessageForm(tuple(value.shape for value in values), dtypes)
