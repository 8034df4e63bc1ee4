"""Values and settings with which the parallel module of a rank is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.ir.plan import PlanError
from shardwright.runtime.deferred.ranges import Ranges, narrowed
from shardwright.runtime.deferred.sources import TensorSources, sources_of

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
        sources: has the values of tensors on the meta device; None: none are there.
    """

    weights: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    device: torch.device = _CPU
    persistent: frozenset[str] = frozenset()
    seed: int = 0
    training: bool = True
    sources: TensorSources | None = None

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
            sources=sources_of(model),
        )

    def valued(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with values: itself, unless it is on the meta device."""
        return self._sources(name).whole(name, tensor) if tensor.is_meta else tensor

    def tile(self, name: str, tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        """The elements of `tensor` within `ranges`; a view, unless it is on the meta device."""
        if not tensor.is_meta:
            return narrowed(tensor, ranges)
        return self._sources(name).tile(name, tensor, ranges)

    def _sources(self, name: str) -> TensorSources:
        if self.sources is None:
            raise PlanError(f"{name} is on the meta device and has no values")
        return self.sources
