"""Values and settings with which the parallel module of a rank is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModuleOptions:
    """Values and settings of a parallel module.

    Attributes:
        weights: the model's parameters by name, each under all of its names.
        buffers: the model's buffers by name.
        device: the device of this rank.
        persistent: names of the buffers in the state dict.
        seed: of random numbers.
        training: the mode that the module is in.
    """

    weights: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    device: torch.device = _CPU
    persistent: frozenset[str] = frozenset()
    seed: int = 0
    training: bool = True

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, seed: int = 0) -> ModuleOptions:
        """The values of `model`, in its mode."""
        return cls(
            weights=dict(model.named_parameters(remove_duplicate=False)),
            buffers=dict(model.named_buffers(remove_duplicate=False)),
            device=device,
            persistent=frozenset(model.state_dict()),
            seed=seed,
            training=model.training,
        )
