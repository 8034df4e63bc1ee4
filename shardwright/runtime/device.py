"""The device that this rank computes on."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ir.options.numerics import Numerics
from shardwright.ir.plan import PlanError
from shardwright.machine.backends import BACKENDS


def default_device(model: nn.Module | None = None) -> torch.device:
    """The device of this rank where the caller names none.

    A GPU, if the process group joins ranks on GPUs and this host has some: that of `LOCAL_RANK`,
    which becomes the current one, unless the caller has chosen another. Without a process group it
    is the device of `model`. Else it is the CPU.

    Raises:
        PlanError: the parameters of `model` are on a GPU and the process group joins CPUs only, or
            this host has fewer GPUs than ranks.
    """
    own = _model_device(model)
    if not dist.is_initialized():
        return own
    joined = group_devices()
    for kind in joined:
        if kind != "cpu" and torch.get_device_module(kind).is_available():
            return _of_rank(kind)
    if own.type not in ("cpu", "meta", *joined):
        raise PlanError(
            f"the model is on {own} and the process group joins ranks on {', '.join(joined)} only;"
            f" use init_process_group without a backend, or give parallelize device='cpu'"
        )
    return torch.device("cpu")


@final
class HostScalar:
    """A scalar that is copied to the host once the device has it.

    The copy is enqueued behind what the device has been given so far, into pinned memory; `value`
    waits for it, and for nothing that was enqueued later.
    """

    def __init__(self, scalar: torch.Tensor) -> None:
        scalar = scalar.detach()
        self._event: torch.cuda.Event | None = None
        if scalar.is_cuda:
            host = torch.empty((), dtype=scalar.dtype, pin_memory=True)
            scalar = host.copy_(scalar, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self._host = scalar

    def value(self) -> float:
        """The scalar."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return float(self._host.item())


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on a device; from the host through pinned memory, so that the host never waits."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def group_devices(group: dist.ProcessGroup | None = None) -> tuple[str, ...]:
    """The types of device, of those known here, whose tensors a group sends; "cpu" comes last."""
    pairs = str(dist.get_backend_config(group)).split(",")
    known = {spec.device for spec in BACKENDS.values()}
    found = {pair.partition(":")[0] for pair in pairs} & known
    return tuple(sorted(found, key=lambda kind: (kind == "cpu", kind)))


def rank_device(local_rank: int, local_ranks: int) -> torch.device:
    """The device of one of so many ranks of this host, made the current one.

    A GPU each where this host has any: of those that are visible, the one with the rank's number,
    or the only one where the launcher shows each rank its own (`CUDA_VISIBLE_DEVICES`).

    Raises:
        PlanError: there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    number = local_rank
    if count < local_ranks:
        if count != 1 or not os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise PlanError(
                f"this host shows {count} GPUs to {local_ranks} ranks; start a rank for each GPU,"
                " or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
            )
        number = 0
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def bound(device: torch.device) -> torch.device | None:
    """The `device_id` of `init_process_group`: a GPU, whose communicator is then made at once."""
    return None if device.type == "cpu" else device


def _of_rank(kind: str) -> torch.device:
    """This rank's device of that type: what was made current, else that of `LOCAL_RANK`."""
    module = torch.get_device_module(kind)
    current = int(module.current_device())
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    if bound is not None and bound.type == kind:
        return torch.device(kind, current if bound.index is None else bound.index)
    if current or kind != "cuda" or "LOCAL_RANK" not in os.environ:
        return torch.device(kind, current)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return rank_device(int(os.environ["LOCAL_RANK"]), ranks)


def _model_device(model: nn.Module | None) -> torch.device:
    first = None if model is None else next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def permit_tf32(device: torch.device, numerics: Numerics) -> None:
    """Let the process's products of float32 matrices run in TF32 if `numerics` ask for it.

    It is torch's switch for the whole process. On CPUs, whose products it may round further than
    TF32 does, it is left as it is.
    """
    if device.type == "cuda" and numerics.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which operators on this kind of device are cast now, None without autocast."""
    if not torch.amp.is_autocast_available(device.type):  # of no use to ask on the meta device
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context in which nothing is cast; a captured graph has its casts as operators."""
    if autocast_dtype(device) is None:
        return nullcontext()
    off: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
    return off
