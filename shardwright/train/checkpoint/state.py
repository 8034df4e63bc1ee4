"""The state of a training run between two steps, and its restoration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim.lr_scheduler import LRScheduler

from shardwright.runtime.plan_transfer import Shapes
from shardwright.runtime.train_module import OnLoss
from shardwright.train.checkpoint import optimizer_state
from shardwright.train.checkpoint.reading import CheckpointError, DamageError
from shardwright.train.data.batches import Batches
from shardwright.train.data.randomness import random_states, set_random_states
from shardwright.train.json_codec import from_json, to_json


class Trainable(Protocol):
    """The interface of a parallel module that training needs."""

    @property
    def known(self) -> Sequence[Shapes]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def lasting_buffers(self) -> Mapping[str, torch.Tensor]: ...

    def random_state(self) -> tuple[int, int]: ...

    def set_random_state(self, state: tuple[int, int]) -> None: ...

    def loss(self, batch: Any) -> torch.Tensor: ...

    def local_batch(self, batch: Any) -> Any: ...

    def train(self, mode: bool = True) -> Any: ...


class Steppable(Trainable, Protocol):
    """A `Trainable` with synchronous steps: each is finished before the next one begins."""

    def forward_backward(
        self, batch: Any, on_loss: OnLoss | None = None, scaler: GradScaler | None = None
    ) -> torch.Tensor: ...

    def random_tensor(self) -> torch.Tensor: ...

    def origin_of_nonfinite(self, batch: Any, state: torch.Tensor) -> str: ...


@dataclass
class TrainingState:
    """The state of a training run on one rank, between two steps.

    Attributes:
        module: the parallel module, which computes the loss.
        optimizer: the optimizer of the module's parameters.
        batches: the endless stream of global batches.
        schedule: the learning-rate schedule; None: constant.
        step: the number of finished steps.
        reads_own: whether `batches` gives only the samples of this rank.
        scaler: scales the loss of a model that computes in float16; None: it is not scaled.
    """

    module: Trainable
    optimizer: torch.optim.Optimizer
    batches: Batches
    schedule: LRScheduler | None = None
    step: int = 0
    reads_own: bool = False
    scaler: GradScaler | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights, persistent buffers and optimizer state, by names independent of the plan."""
        state = optimizer_state.tensors_of(self.optimizer, self._names)
        return self._model() | {f"optimizer/{key}": value for key, value in state.items()}

    def record(self) -> dict[str, Any]:
        """The rest of the state, as values for JSON.

        Every rank calls it; only the result of rank 0 has the optimizer's state of all ranks.
        """
        return {
            "module": list(self.module.random_state()),
            "optimizer": _merged(optimizer_state.facts_of(self.optimizer, self._names)),
            "schedule": None if self.schedule is None else to_json(self.schedule.state_dict()),
            "scaler": None if self.scaler is None else to_json(self.scaler.state_dict()),
            "data": to_json(self.batches.state_dict()),
            "random": to_json(random_states()),
        }

    def prepare(self, record: Mapping[str, Any], index: Metadata) -> dict[str, torch.Tensor]:
        """The tensors to load a checkpoint into; those of the optimizer are allocated.

        Args:
            record: the checkpoint's result of `record`.
            index: the names and shapes of the checkpoint's tensors.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or is damaged.
        """
        model = self._model()
        stored = {
            key: tuple(kind.size)
            for key, kind in index.state_dict_metadata.items()
            if isinstance(kind, TensorStorageMetadata)
        }
        for key, tensor in model.items():
            name, shape = key.removeprefix("model/"), tuple(tensor.shape)
            if key not in stored:
                raise CheckpointError(f"it has no {name}, the model has; is it of another model?")
            if stored[key] != shape:
                why = "is it of another model?"
                if prod(stored[key]) == prod(shape):
                    why = (
                        "earlier versions stored some parameters in other shapes; go on from the"
                        " weights that such a version exports"
                    )
                raise CheckpointError(
                    f"it has {name} of shape {stored[key]}, the model's is {shape}; {why}"
                )
        state = optimizer_state.allocate(self.optimizer, self._names, record["optimizer"])
        made = {f"optimizer/{key}": value for key, value in state.items()}
        if missing := made.keys() - stored.keys():
            raise DamageError(
                f"the checkpoint has no {min(missing)}, of which it tells; it is damaged"
            )
        return model | made

    def restore(self, record: Mapping[str, Any], step: int) -> None:
        """Restore the state in `record`, after the tensors have been loaded.

        Raises `CheckpointError` if only one of job and checkpoint has a learning-rate schedule.
        """
        seed, draws = record["module"]
        self.module.set_random_state((int(seed), int(draws)))
        if (record["schedule"] is None) != (self.schedule is None):
            has = "none" if record["schedule"] is None else "one"
            raise CheckpointError(f"it has {has} learning-rate schedule, unlike the job")
        if self.schedule is not None:
            self.schedule.load_state_dict(from_json(record["schedule"]))
        if self.scaler is not None and record.get("scaler") is not None:
            self.scaler.load_state_dict(from_json(record["scaler"]))
        self.batches.load_state_dict(from_json(record["data"]))
        set_random_states(from_json(record["random"]))
        self.step = step

    @property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.module.named_parameters()}

    def _model(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {
            **{name: p.detach() for name, p in self.module.named_parameters()},
            **self.module.lasting_buffers(),
        }
        return {f"model/{name}": tensor for name, tensor in named.items()}


def _merged(facts: dict[str, Any]) -> dict[str, Any]:
    """On rank 0 the facts of all ranks, because a stage knows only its own parameters."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return facts
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(facts, found if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank() != 0:
        return facts
    members = [
        list(dict.fromkeys(name for other in found for name in other["members"][number]))
        for number in range(len(facts["members"]))
    ]
    state = {name: kept for other in found for name, kept in other["state"].items()}
    return {"groups": facts["groups"], "members": members, "state": state}
