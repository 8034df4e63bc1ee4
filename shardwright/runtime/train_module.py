"""The interface of every module that runs a plan: training steps and their persistent state."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.amp import GradScaler

from shardwright.ir.graph import Graph
from shardwright.ir.plan import PlanError
from shardwright.program.step.step_program import UpdateParts
from shardwright.rules.operators.mlp_chunks import number_drawn_by
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.device import autocast_dtype
from shardwright.runtime.executor.executor import Updater
from shardwright.runtime.executor.failures import agree
from shardwright.runtime.modes import Modes
from shardwright.runtime.parameters.loss_scaling import ScaledOptimizer
from shardwright.runtime.parameters.optimizer_hooks import require_own
from shardwright.runtime.parameters.submodules import (
    SubModule,
    mirror,
    plain_attributes,
    refuse_other,
)
from shardwright.runtime.regions.regions import Regions
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.pretrained import PretrainedForm, save_pretrained
from shardwright.tracing.arguments import BatchError
from shardwright.tracing.graph_builder import DROPOUT


class LastingModule(nn.Module):
    """A module with state that persists from step to step.

    Sub-classes register `_sw_random`, the state of random numbers, and set `_sw_updates`, the names
    of the buffers that a call writes.
    """

    _sw_updates: tuple[str, ...]
    _sw_groups: tuple[dist.ProcessGroup, ...] = ()  # along each axis of its mesh
    _sw_channels: Mapping[str, dist.ProcessGroup] = MappingProxyType({})
    _sw_saved: PretrainedForm | None = None  # how its weights are saved
    _sw_next: torch.Tensor | None = None  # what is added to the random state after a step

    def _sw_groups_by_id(self) -> dict[int, dist.ProcessGroup]:
        """The groups of its mesh and its channels, each once."""
        every = (*self._sw_groups, *self._sw_channels.values())
        return {id(group): group for group in every}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with parameters and buffers of its own, on the same process groups.

        Averages of weights need one (`torch.optim.swa_utils.AveragedModel`).
        """
        memo.update(self._sw_groups_by_id())
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def lasting_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the next step needs: those of the state dict and those that steps write.

        A buffer with several names is there under its first one.
        """
        lasting = {*self.state_dict(), *self._sw_updates}
        return {name: buffer for name, buffer in self.named_buffers() if name in lasting}

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_shard_size: str | int = "5GB"
    ) -> None:
        """Write the model's state dict as safetensors files; every rank calls it.

        `from_pretrained` of a Hugging Face model reads the folder, which has its configuration too,
        and so does `parallelize(..., weights=folder)`. No rank has more in memory than its tiles
        and a chunk of 16 MiB. A tensor with several keys is written under the first.

        Args:
            folder: on a file system that all ranks share; weights in it are replaced.
            max_shard_size: the size of a file, in bytes or as `"5GB"`; a larger tensor has a file
                of its own.

        Raises:
            CheckpointError: on all ranks, where one cannot write.
        """
        if self._sw_saved is None:
            raise CheckpointError("only modules that parallelize returned are saved")
        tensors = {**dict(self.named_parameters(remove_duplicate=False)), **self.lasting_buffers()}
        save_pretrained(tensors, self._sw_saved, folder, max_shard_size)

    @property
    def updated_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that a call writes, as the running statistics of batch norm."""
        return self._sw_updates

    def _sw_advance(self) -> None:
        """Go on to the numbers of the next step."""
        state = self._sw_state
        if torch.compiler.is_compiling():  # an attribute set in the first call compiles a second
            self._buffers["_sw_random"] = state + state.new_tensor([0, 1])
            return
        if self._sw_next is None or self._sw_next.device != state.device:
            self._sw_next = state.new_tensor([0, 1])
        # Not in place: tensors that autograd saved in this step may still read the old state. This
        # replaces the registered buffer without the checks of `Module.__setattr__` (10 us).
        self._buffers["_sw_random"] = state + self._sw_next

    @property
    def _sw_state(self) -> torch.Tensor:
        """The random state; a registered buffer, whose look-up by name takes a microsecond."""
        state = self._buffers["_sw_random"]
        assert state is not None
        return state

    def random_state(self) -> tuple[int, int]:
        """The seed and the number of steps that random numbers depend on; waits for the device."""
        seed, step = self._sw_state.tolist()
        return seed, step

    def random_tensor(self) -> torch.Tensor:
        """The numbers of `random_state`, int64 [2], on its device.

        Steps replace the tensor, and none writes to it.
        """
        return self._sw_state

    def share_random_state(self, other: LastingModule) -> None:
        """Go on with the random numbers of `other`, without a wait for the device."""
        self._buffers["_sw_random"] = other._sw_state

    def set_random_state(self, state: tuple[int, int]) -> None:
        """Set the state of random numbers for the next step, as after loading a checkpoint.

        Args:
            state: seed and number of steps, as `random_state` gave them.
        """
        self._sw_random = self.get_buffer("_sw_random").new_tensor(state)


OnLoss = Callable[[torch.Tensor], object]


class StepModule(Protocol):
    """The module of a step program, which updates parameters as `update_parts` say."""

    update_parts: UpdateParts

    def update(self, optimizer: Updater) -> None:
        """The update of the parameters at the end of the step that ran last."""


class TrainModule(LastingModule, ABC):
    """A module that can take training steps on global batches.

    A batch is a mapping of keyword arguments or a tuple of positional ones. With `modes` the module
    switches between training and evaluation as the model does; without them evaluation only
    disables dropout.
    """

    _sw_program: StepModule
    _sw_modes: Modes | None = None
    _sw_given: Mapping[str, Any] | None = None  # attributes of the model
    _sw_autocast: torch.dtype | None = None  # when it was made
    _sw_device: torch.device
    _sw_optimizer = 0  # identity of the one that was checked last
    _sw_draws = False  # whether what runs draws dropout
    _sw_switched: bool | None = None  # whether the modules of its programs draw, if that is known
    _sw_compiled = False
    _sw_last_rows: int | None = None  # of the last call's batch, if it had fewer than planned

    def _sw_set_modes(self, modes: Modes) -> None:
        """Use `modes` for train and eval from now on."""
        self._sw_modes = modes
        modes.attach(self)
        self._sw_running()  # now, so that a compiler does not trace it

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sw_given is not None and not name.startswith("_sw_"):
            if isinstance(value, nn.Parameter | nn.Module) and (
                name in self._parameters or name in self._modules
            ):
                raise PlanError(
                    f"{name} cannot be replaced: the plan computes with that of the model; write"
                    " into parameters under torch.no_grad(), or change the model before"
                    " sw.parallelize"
                )
            refuse_other(self._sw_given, name, value)
        super().__setattr__(name, value)

    def _sw_mirror(self, model: nn.Module) -> None:
        """Show the sub-modules and the configuration of `model`, and refuse other attributes.

        The configuration, as of transformers, is a copy for those who read it.
        """
        mirror(self, model)
        if hasattr(config := getattr(model, "config", None), "save_pretrained"):
            self.config = copy.deepcopy(config)
        self._sw_given = plain_attributes(model)
        self._sw_autocast = autocast_dtype(self._sw_device)

    def train(self, mode: bool = True) -> Self:
        """Switch to training or evaluation, as the model's own `train` does.

        The graph of a new mode is captured at its first call.

        Args:
            mode: True for training, False for evaluation.
        """
        if self._sw_modes is None:
            return super().train(mode)
        self._sw_modes.switch(self, mode)
        return self

    def _sw_running(self, rows: int | None = None) -> Self:
        """The module that runs in this mode, made ready: this one, or that of the mode's graph.

        With `rows`, that of a batch of fewer rows than planned. Raises `PlanError` if the model
        cannot run in this mode under the plan, `BatchError` if it cannot run that batch.
        """
        if not torch.compiler.is_compiling():
            self._sw_check_autocast()
        if self._sw_modes is None:
            self._sw_draws = self.training and _has_dropout(self.graph)
            return self
        found = self._sw_modes.running(self, rows)
        other: Self = self if found.module is None else found.module
        if other is not self:
            other.training = self.training
            other._sw_random = self.get_buffer("_sw_random")
            if self._sw_compiled and not other._sw_compiled:
                other.compile_programs()
        if other._sw_switched != found.draws:
            other._sw_switched = found.draws
            for program in other.programs():
                for module in program.modules():
                    # Not `train`: a module that was kept whole stays in the mode of its capture.
                    module.training = found.draws
            other._sw_draws = found.draws and _has_dropout(other.graph)
        return other

    def _sw_check_autocast(self) -> None:
        """Raise `BatchError` unless operators are cast as they were when the plan was captured."""
        now = autocast_dtype(self._sw_device)
        if now is not self._sw_autocast:
            raise BatchError(
                f"autocast is {now or 'off'} in this call and was {self._sw_autocast or 'off'} when"
                " the plan was made, which has its casts as operators; call sw.plan and"
                " sw.parallelize within the autocast that the module is called in, or write it"
                " into the model's forward"
            )

    def prepare_evaluation(self) -> None:
        """Make ready to evaluate now; raises `PlanError` where that is impossible."""
        was = self.training
        self.train(False)
        self._sw_running()
        self.train(was)

    @abstractmethod
    def forward_backward(
        self, batch: Any, on_loss: OnLoss | None = None, scaler: GradScaler | None = None
    ) -> torch.Tensor:
        """The loss of a global batch; its gradients are added to `grad`.

        `on_loss` is called with the loss as soon as it is issued to the device: before the backward
        pass where the program has it by then. With a `scaler`, gradients are those of the loss that
        it has scaled.
        """

    def train_step(
        self, optimizer: torch.optim.Optimizer, batch: Any, scaler: GradScaler | None = None
    ) -> torch.Tensor:
        """Make one optimizer step: set gradients to None, run forward and backward pass, update.

        Args:
            optimizer: of the parameters of this module.
            batch: the global batch, or this rank's part of it, as a mapping or a sequence.
            scaler: scales the loss of a model that computes in float16, and skips the update on all
                ranks where a gradient is not finite on any.

        Returns:
            The loss of the global batch before the update, a scalar.

        Raises:
            PlanError: the optimizer has no parameter of this module.
        """
        if self._sw_optimizer != id(optimizer):
            require_own(optimizer, self)
            self._sw_optimizer = id(optimizer)
        optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(batch, scaler=scaler)
        scaled = optimizer if scaler is None else ScaledOptimizer(optimizer, scaler)
        self._sw_running(self._sw_last_rows)._sw_program.update(scaled)
        return loss

    def recover(self) -> None:
        """Make the module usable again after an error in the middle of a step.

        Call it on every rank, once all have seen an error. A module that communicates refuses
        further steps until then: another rank may still be in the failed one. Gradients that the
        step has set are left; set them to None.

        Raises:
            StepFailedError: the ranks failed in different places, on every rank.
        """
        every = [one for one in self.modules() if isinstance(one, Regions)]
        if dist.is_initialized():
            agree(next((one.failure for one in every if one.failure is not None), None))
        for one in every:
            one.failure = None

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The serial graph of which it runs a part."""

    @abstractmethod
    def local_batch(self, batch: Any) -> Any:
        """This rank's part of a global batch, for loaders that read only their own."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Let the collectives of its process groups, made for its mesh, fail after `timeout`.

        Groups of a mesh are made with the default of their backend, not with what
        `init_process_group` was given.
        """
        for group in self._sw_groups_by_id().values():
            backend_of(group).set_timeout(group, timeout)

    def programs(self) -> list[fx.GraphModule]:
        """The graphs that this rank runs; those within others too."""
        return [
            module
            for module in self.modules()
            if isinstance(module, fx.GraphModule) and not issubclass(type(module), SubModule)
        ]

    def compile_programs(self) -> None:
        """From the next step on run through `torch.compile`; a second call changes nothing."""
        if self._sw_compiled:
            return
        self._sw_compiled = True
        for module in list(self.modules()):
            if isinstance(module, Regions):
                module.compile_segments(self.get_buffer("_sw_random").device)


def _has_dropout(graph: Graph) -> bool:
    return any(op.target == DROPOUT or number_drawn_by(op) is not None for op in graph.ops)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that `batch` stands for."""
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
