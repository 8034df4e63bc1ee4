"""Writes and reads a model's weights as safetensors files with the model's keys.

A file has the tensors of `model.state_dict()`, whole and in the module's own shapes, and each tied
tensor once. The folder of a Hugging Face model also has its configuration, so that
`from_pretrained` can read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.ir.atomic_io import replace_durably
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.pretrained import (
    PretrainedForm,
    has_adapters,
    save_pretrained,
)
from shardwright.runtime.weight_files.safetensors_paths import SUFFIX as SUFFIX
from shardwright.runtime.weight_files.safetensors_paths import readable, weight_files
from shardwright.train.checkpoint.state import Trainable


def full_state_dict(module: Trainable, model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of `model` with the trained values of `module`, on the host of rank 0.

    Every rank calls it; the result of ranks other than 0 is empty. `model` gives the keys and may
    be on the meta device. Raises `CheckpointError` for a key that no rank has.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    local: dict[str, torch.Tensor] = {
        **dict(module.named_parameters()),
        **module.lasting_buffers(),
    }
    owners, first = _owners(local), _first_names(model)
    found: dict[str, torch.Tensor] = {}
    for key in model.state_dict():
        name = first.get(key, key)
        if name not in owners:
            raise CheckpointError(f"the parallel module has no {key}; was it made of this model?")
        whole = _gathered(local.get(name), *owners[name])
        if is_first:
            found[key] = whole.cpu().contiguous()
    return found


Home = tuple[int, torch.dtype, tuple[int, ...], torch.device]  # first rank, dtype, shape, device


def _owners(local: Mapping[str, torch.Tensor]) -> dict[str, Home]:
    """The `Home` of every tensor by name; stages of a pipeline have different tensors."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = {name: (rank, t.dtype, tuple(t.shape), t.device) for name, t in local.items()}
    if not dist.is_initialized():
        return mine
    every: list[dict[str, Home]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return {name: home for found in reversed(every) for name, home in found.items()}


def _gathered(
    local: torch.Tensor | None,
    home: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    """The full tensor, at least on rank 0; `local` is this rank's tile, or None."""
    whole = None if local is None else local.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    if home != 0:
        here = (
            torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        )
        whole = torch.empty(shape, dtype=dtype, device=here) if whole is None else whole.clone()
        dist.broadcast(whole, src=home)
    assert whole is not None or dist.get_rank() != 0, "what is at home on rank 0 is there"
    return torch.empty(0) if whole is None else whole


def export_safetensors(module: Trainable, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the trained weights under the model's own keys; every rank calls it.

    A tensor with several keys, such as a tied embedding, is written under the first of them;
    `load_safetensors` and `from_pretrained` tie it again. The file is written under a temporary
    name, synced, and then renamed.

    Args:
        module: the trained parallel module.
        model: gives the keys; it may be on the meta device.
        path: the file.

    Raises:
        CheckpointError: the file cannot be written, or `module` lacks a tensor of `model`.
    """
    state = full_state_dict(module, model)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    first = _first_names(model)
    kept = {key: value for key, value in state.items() if first.get(key, key) == key}
    target = Path(path)
    staging = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _safetensors()[0](kept, staging, metadata={"format": "pt"})
        replace_durably(staging, target)
    except OSError as e:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {target}: {e.strerror}; choose another path") from e


def check_export(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Raise `CheckpointError` if weights of `model` cannot be written to `path`.

    That is without safetensors, and for a folder of a model that is not of Hugging Face.
    """
    _safetensors()
    named = os.fspath(path).endswith(SUFFIX)
    if not named and not (hasattr(model, "config") and hasattr(model, "save_pretrained")):
        raise CheckpointError(
            f"{type(model).__name__} is no Hugging Face model, so no folder is written; write its"
            f" weights to one file, as in model{SUFFIX}"
        )


def export_pretrained(module: Trainable, model: Any, folder: str | os.PathLike[str]) -> None:
    """Write a folder that `from_pretrained` of the model's class reads; every rank calls it.

    All ranks write to a shared file system, and no rank gathers a whole tensor. For a model with
    PEFT adapters, rank 0 writes the adapters alone with the model's own `save_pretrained`.

    Args:
        module: the trained parallel module.
        model: the Hugging Face model, which may be on the meta device.
        folder: the folder.

    Raises:
        CheckpointError: the folder cannot be written, or `model` is not of Hugging Face.
    """
    check_export(model, folder)
    if has_adapters(model):
        _export_adapters(module, model, folder)
        return
    tensors = {**dict(module.named_parameters()), **module.lasting_buffers()}
    save_pretrained(tensors, PretrainedForm.of(model), folder, "5GB")


def _export_adapters(module: Trainable, model: Any, folder: str | os.PathLike[str]) -> None:
    """Write the trained adapters with the model's own `save_pretrained`, on rank 0."""
    state = full_state_dict(module, model)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    try:
        model.save_pretrained(folder, state_dict=state)
    except OSError as e:
        raise CheckpointError(f"cannot write {folder}: {e.strerror}; choose another path") from e


def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copy the weights in a safetensors file into `model`, before it is made parallel.

    Raises `CheckpointError` if the file cannot be read, or has other keys or shapes than `model`.
    """
    _put(model, _read(path), path)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copy stored weights into `model`, before it is made parallel.

    Args:
        model: a module that is not on the meta device.
        path: a safetensors file, or a folder that `save_pretrained` wrote: `model.safetensors`, or
            several files with `model.safetensors.index.json`.

    Raises:
        CheckpointError: a file cannot be read, or its keys or shapes differ from the model's.
    """
    if not Path(path).is_dir():
        load_safetensors(model, path)
        return
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(Path(path)):
        state.update(_read(file))
    _put(model, state, path)


def check_weights(path: str | os.PathLike[str]) -> None:
    """Raise `CheckpointError` if `load_weights` could not open the files; reads no tensor."""
    _safetensors()
    from safetensors import safe_open

    for file in weight_files(Path(path)):
        with readable(file), safe_open(file, framework="pt"):
            pass


def _read(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    load = _safetensors()[1]
    with readable(path):
        return load(path)


def _put(model: nn.Module, state: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    own, first = model.state_dict(), _first_names(model)
    given = {first.get(key, key) for key in state}  # one name of a tied tensor is enough
    needed = {first.get(key, key) for key in own}
    if odd := sorted(set(state) - set(own)) + sorted(needed - given):
        raise CheckpointError(
            f"{path} is of another model: {odd[0]} is in one of them only ({len(odd)} keys differ)"
        )
    for key, value in state.items():
        if value.shape != own[key].shape:
            raise CheckpointError(
                f"{path} has {key} of shape {tuple(value.shape)}, the model's is"
                f" {tuple(own[key].shape)}"
            )
    with torch.no_grad():
        for key, value in state.items():
            own[key].copy_(value)


def _first_names(model: nn.Module) -> Mapping[str, str]:
    """For every name of a parameter or buffer, the first name of the same tensor."""
    first: dict[int, str] = {}
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def _safetensors() -> tuple[Callable[..., None], Callable[..., dict[str, torch.Tensor]]]:
    try:
        from safetensors.torch import load_file, save_file
    except ImportError as e:
        raise CheckpointError("safetensors is not installed: pip install 'shardwright[hf]'") from e
    return save_file, load_file
