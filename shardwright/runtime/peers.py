"""The link of a stage to its neighbours on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.lower.stages import Stage
from shardwright.runtime.async_stage import Tensors
from shardwright.runtime.channel import Channel, Form


class Peers:
    """Four channels, to and from the ranks before and behind this one; stage k is on rank k."""

    def __init__(
        self, parts: Sequence[Stage], rank: int, device: torch.device, timeout: timedelta
    ) -> None:
        self.lag = len(parts) - rank - 1
        self.is_open = False
        groups = [dist.new_group(list(range(len(parts)))) for _ in range(2)]
        for group in groups:
            dist.barrier(group=group)  # connects all ranks, before any of them sends
        values, gradients = groups

        def channel(form: Form, peer: int, group: Any) -> Channel:
            return Channel(form, peer, peer, group, device, timeout)

        self.values_in = self.values_out = self.gradients_in = self.gradients_out = None
        if rank > 0:
            forward, backward = _forms(parts[rank - 1])
            self.values_in = channel(forward, rank - 1, values)
            self.gradients_out = channel(backward, rank - 1, gradients)
        if rank < len(parts) - 1:
            forward, backward = _forms(parts[rank])
            self.values_out = channel(forward, rank + 1, values)
            self.gradients_in = channel(backward, rank + 1, gradients)

    def open(self) -> None:
        """Begin to receive both ways."""
        self.is_open = True
        for channel in (self.values_in, self.gradients_in):
            if channel is not None:
                channel.begin_receive()

    def close(self) -> None:
        """A token runs to the last stage and back: when this returns, all stages are done."""
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
        """Tell the neighbours, who wait for a message each, why none will come."""
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
        """Values with nothing after them."""
        assert self.values_in is not None
        return self.values_in.receive(ahead=False)[0]

    def return_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Hand the last stage's loss back to the first."""
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


def _forms(stage: Stage) -> tuple[Form, Form]:
    """Of the messages between `stage` and the one behind it: values, gradients."""

    def form(names: Sequence[str]) -> Form:
        tensors = [stage.graph.tensor[name] for name in names]
        dtypes = tuple(getattr(torch, tensor.dtype) for tensor in tensors)
        return Form(tuple(tensor.shape for tensor in tensors), dtypes)

    return form(stage.sent), form(stage.returning_gradient(stage.sent))
