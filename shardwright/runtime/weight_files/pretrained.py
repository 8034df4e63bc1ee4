"""Writes what `from_pretrained` reads: sharded safetensors files and the configuration."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ir.atomic_io import replace_durably
from shardwright.ir.frontier import parse_bytes
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.saving import save_sharded


@dataclass(frozen=True)
class PretrainedForm:
    """The keys and configurations that the files of a model have.

    Attributes:
        keys: of its state dict, of a tensor with several the first, as it is tied again.
        configs: have `save_pretrained(folder)`, as those of transformers.
        adapted: whether it has PEFT's adapters, which are saved alone.
    """

    keys: tuple[str, ...]
    configs: tuple[Any, ...]
    adapted: bool

    @classmethod
    def of(cls, model: nn.Module) -> PretrainedForm:
        """The form of `model`, which may be on the meta device."""
        first: dict[int, str] = {}
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
        keys = (key for key in model.state_dict() if names.get(key, key) == key)
        configs = (getattr(model, name, None) for name in ("config", "generation_config"))
        return cls(
            tuple(keys),
            tuple(one for one in configs if hasattr(one, "save_pretrained")),
            has_adapters(model),
        )


def has_adapters(model: Any) -> bool:
    """Whether it is a `PeftModel`, or one that `add_adapter` has been called on."""
    if any(kind.__name__ == "PeftModel" for kind in type(model).__mro__):
        return True
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def save_pretrained(
    tensors: Mapping[str, torch.Tensor],
    form: PretrainedForm,
    folder: str | os.PathLike[str],
    max_shard_size: str | int,
) -> None:
    """Write the folder from what all ranks have; `tensors` are those of this rank by name."""
    if form.adapted:
        raise CheckpointError(
            "the model has PEFT's adapters; export_pretrained(module, model, folder) of"
            " shardwright.train.checkpoint.export writes them as PEFT does"
        )
    size = int(parse_bytes(max_shard_size))
    kept = {key: tensors[key] for key in form.keys if key in tensors}
    save_sharded(kept, form.keys, folder, size)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _save_configs(form, Path(folder))


def _save_configs(form: PretrainedForm, folder: Path) -> None:
    """Write the configurations, each file whole or not at all."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".configs") as made:
            for config in form.configs:
                config.save_pretrained(made)
            for file in sorted(Path(made).iterdir()):
                replace_durably(file, folder / file.name)
    except OSError as e:
        raise CheckpointError(
            f"cannot write the configuration to {folder}: {e.strerror or e}; choose another path"
        ) from e
