"""Links of a stage to its neighbours on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.program.step.instructions import Payload, Recv, Send
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.comm.channel import Channel, MessageForm, SentMessage


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
        """The ranks that share the stage, for messages."""
        ranks = ", ".join(map(str, self.others))
        return f"stage {self.stage} ({'one of ranks' if self.others[1:] else 'rank'} {ranks})"


@dataclass(frozen=True)
class ChannelEnd:
    """Sends or receives the messages of one instruction on a channel."""

    channel: Channel
    form: MessageForm
    ahead: bool

    def send(self, values: Sequence[torch.Tensor | None], _device: torch.device) -> SentMessage:
        """Start to send values; None is zeros."""
        return self.channel.send(self.form, values)

    def receive(self, _device: torch.device) -> Arrival:
        """Start to receive, unless that was started ahead."""
        self.channel.begin_receive()
        return Arrival(self)


@dataclass(frozen=True)
class Arrival:
    """A message that is being received."""

    end: ChannelEnd

    def results(self) -> list[torch.Tensor]:
        """Wait for it; its values."""
        return self.end.channel.receive(self.end.form, ahead=self.end.ahead)


class StageLinks:
    """Four channels: to and from the ranks with this index in the previous and the next stage.

    Each has a process group of its two ranks: under NCCL a message waits for all that were begun
    before it in its group, so channels that share one can wait for each other in a circle.
    """

    def __init__(
        self, program: StepProgram, seat: Seat, device: torch.device, timeout: timedelta
    ) -> None:
        stage, stages = seat.stage, len(seat.ranks)
        self.lag = stages - stage - 1
        self.is_open = False

        groups = [(_pairs(seat, k), _pairs(seat, k)) for k in range(stages - 1)]

        messages = {(type(one), one.backward): form_of(one.payload) for one in program.messages()}

        def channel(kind: type[Send | Recv], backward: bool, peer: int, group: Any) -> Channel:
            dist.barrier(group=group)  # connects both, before any of them sends
            form = messages[kind, backward]
            return Channel(form, seat.ranks[peer], peer, group, device, timeout)

        self.values_in = self.values_out = self.gradients_in = self.gradients_out = None
        if stage > 0:
            values, gradients = groups[stage - 1]
            self.values_in = channel(Recv, False, stage - 1, values)
            self.gradients_out = channel(Send, True, stage - 1, gradients)
        if stage < stages - 1:
            values, gradients = groups[stage]
            self.values_out = channel(Send, False, stage + 1, values)
            self.gradients_in = channel(Recv, True, stage + 1, gradients)

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

    def end(self, one: Send | Recv, *, ahead: bool) -> ChannelEnd:
        """The end of a message; `ahead` begins to receive the next one when it has arrived."""
        if isinstance(one, Send):
            channel = self.gradients_out if one.backward else self.values_out
        else:
            channel = self.gradients_in if one.backward else self.values_in
        assert channel is not None, f"no stage is at the other end of {one}"
        return ChannelEnd(channel, form_of(one.payload), ahead)


def _pairs(seat: Seat, stage: int) -> Any:
    """New groups of each rank of a stage and its neighbour of the next, on all ranks; this rank's.

    All ranks make all groups in one order, as NCCL needs where it splits them off another one.
    """
    return dist.new_subgroups_by_enumeration([list(c[stage : stage + 2]) for c in seat.chains])[0]


def form_of(payload: Sequence[Payload]) -> MessageForm:
    """The form of a message with this payload."""
    dtypes = tuple(getattr(torch, one.dtype) for one in payload)
    return MessageForm(tuple(one.shape for one in payload), dtypes)
