"""Reads the index of a `torch.distributed.checkpoint` folder without running code from it.

torch reads an index with plain pickle. Here it may name only the few classes that it is made of,
and every file that it names must lie beside it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from shardwright.ir.atomic_io import printable, read_up_to

INDEX = ".metadata"
LARGEST_INDEX = 2**30  # bytes; one of a million tiles has 200 MiB

_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # the layout of a name, looked up in a table
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or that is none for this run."""


class DamageError(CheckpointError):
    """Stored bytes that are not those which were written."""


def unreadable(error: BaseException) -> str:
    """Why bytes could not be unpickled, in one line; torch advises to load them without checks."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors"
    line = printable(str(error).strip().partition("\n")[0])[:200]
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def read_index(folder: Path, sizes: Mapping[str, int]) -> Metadata:
    """The index in `folder`, checked; raises `DamageError` for what is no index of tensors."""
    try:
        data = read_up_to(folder / INDEX, LARGEST_INDEX)
        found = _Unpickler(io.BytesIO(data)).load()
        _check(found, sizes)
    except CheckpointError as e:
        raise DamageError(f"{folder / INDEX}: {e}") from None
    except Exception as e:  # a damaged pickle may raise anything
        text = " ".join(f"{type(e).__name__}: {e}".split())
        raise DamageError(f"{folder / INDEX} is no index of a checkpoint ({text})") from e
    assert isinstance(found, Metadata)
    found.storage_meta = StorageMeta()
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name == "PosixPath":
            return PosixPath  # where it was written; read and forgotten
        raise CheckpointError(f"it names {module}.{name}, which no checkpoint needs")


def _check(found: object, sizes: Mapping[str, int]) -> None:
    if not isinstance(found, Metadata):
        raise CheckpointError(f"it is a {type(found).__name__}")
    for key, kind in found.state_dict_metadata.items():
        if not isinstance(kind, TensorStorageMetadata):
            raise CheckpointError(f"{key!r} is no tensor, and nothing else is read")
        dims = len(kind.size)
        if not isinstance(kind.properties.dtype, torch.dtype):
            raise CheckpointError(f"{key!r} has the dtype {kind.properties.dtype!r}")
        for chunk in kind.chunks:
            if len(chunk.offsets) != dims or len(chunk.sizes) != dims:
                raise CheckpointError(f"{key!r} of {dims} dimensions has a part of others")
    stored = found.storage_data
    if not isinstance(stored, dict):
        raise CheckpointError("it does not say where tensors lie")
    for index, at in stored.items():
        if at.relative_path not in sizes or Path(at.relative_path).name != at.relative_path:
            raise CheckpointError(f"{index.fqn!r} lies in {at.relative_path!r}, no file of it")
        if at.offset < 0 or at.length < 0 or at.offset + at.length > sizes[at.relative_path]:
            raise CheckpointError(f"{index.fqn!r} lies beyond the end of {at.relative_path}")
        if at.transform_descriptors:
            raise CheckpointError(f"{index.fqn!r} is transformed, which is not read")
