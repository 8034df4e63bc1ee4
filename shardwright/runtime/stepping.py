"""What every module that runs a plan offers, however it runs it: steps, and what lasts of them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import fx, nn

from shardwright.ir.graph import Graph
from shardwright.runtime.compiled import compiled


class LastingModule(nn.Module):
    """A module with a state that goes on from step to step.

    Sub-classes register `_sw_random`, the state that random numbers depend on,
    and set `_sw_updates`, the names of the buffers that a call writes.
    """

    _sw_updates: tuple[str, ...]
    _sw_groups: tuple[dist.ProcessGroup, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with parameters and buffers of its own, on the same process groups.

        Averages of weights need one (`torch.optim.swa_utils.AveragedModel`).
        """
        memo.update((id(group), group) for group in self._sw_groups)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def lasting_buffers(self) -> dict[str, torch.Tensor]:
        """What the next step needs of buffers: those of the state dict and those that steps write.

        A buffer with several names is there under its first one.
        """
        lasting = {*self.state_dict(), *self._sw_updates}
        return {name: buffer for name, buffer in self.named_buffers() if name in lasting}

    @property
    def updated_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that a call writes, as the running statistics of batch norm."""
        return self._sw_updates

    def random_state(self) -> tuple[int, int]:
        """The seed and the number of steps that random numbers depend on."""
        seed, step = self.get_buffer("_sw_random").tolist()
        return seed, step

    def set_random_state(self, state: tuple[int, int]) -> None:
        """Draw from the next step on what a module in this state would draw."""
        self._sw_random = self.get_buffer("_sw_random").new_tensor(state)


class SteppingModule(LastingModule, ABC):
    """A module that can take training steps on global batches.

    A batch is a mapping of keyword arguments or a tuple of positional ones.
    """

    @abstractmethod
    def forward_backward(self, batch: Any) -> torch.Tensor:
        """The loss of a global batch; its gradients are added to `grad`."""

    def train_step(self, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        """One optimizer step on a global batch; its loss."""
        optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(batch)
        optimizer.step()
        return loss

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The serial graph of which it runs a part."""

    @abstractmethod
    def local_batch(self, batch: Any) -> Any:
        """This rank's part of a global batch, for loaders that read only their own."""

    def programs(self) -> list[fx.GraphModule]:
        """What this rank runs, as graphs; those within others too."""
        return [module for module in self.modules() if isinstance(module, fx.GraphModule)]

    def compile_programs(self) -> None:
        """From the next step on run through `torch.compile`."""
        found = self.programs()
        within = {id(m) for program in found for m in program.modules() if m is not program}
        for parent in list(self.modules()):
            for name, program in list(parent.named_children()):
                if isinstance(program, fx.GraphModule) and id(program) not in within:
                    setattr(parent, name, compiled(program))


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that `batch` stands for."""
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
