"""Runs a sub-module that capture kept whole, in the same way on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwright.program.instructions import RunModule
from shardwright.runtime.random.fused_rng import number_in, seed_of, seeded
from shardwright.tracing.export.opaque import OpaqueCall
from shardwright.tracing.gradients.autograd_functions import FunctionCall


class OwnFunction(nn.Module):
    """One call of an autograd function, on tiles or on whole tensors, with its own backward."""

    def __init__(self, call: FunctionCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, tensors: Sequence[torch.Tensor], key: str, kind: str) -> list[torch.Tensor]:
        """The function's results; `key` and `kind` name it in the graph."""
        return self.call(tensors)

    def extra_repr(self) -> str:
        return self.call.kind


class OpaqueModule(nn.Module):
    """One `RunModule` instruction: gradients flow through the module's own code.

    Its random numbers are seeded by seed, step and position in the graph, so that
    all ranks draw the same. `training` is the mode in which the model was captured.
    """

    def __init__(
        self, instruction: RunModule, call: OpaqueCall, device: torch.device, training: bool
    ) -> None:
        super().__init__()
        self.training = training  # parts of the module may be in another mode, and stay there
        self.call, self.device = call, device
        self.number = instruction.number

    def train(self, mode: bool = True) -> OpaqueModule:
        """Switch the module only where the mode changes."""
        if mode is not self.training:
            self.call.module.train(mode)
        return super().train(mode)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Parameters and buffers of the module, its tensors, and the random state."""
        *tensors, state = given
        with seeded(seed_of(state, "module", number_in(state, self.number)), self.device):
            return tuple(self.call(tensors))

    def extra_repr(self) -> str:
        return self.call.path
