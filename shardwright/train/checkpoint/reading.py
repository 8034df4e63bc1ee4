"""Reads `torch.distributed.checkpoint` files without running code from them.

torch reads the tensors of a checkpoint with `weights_only`, but its index with
plain pickle, and what is no tensor with plain pickle too. Here the index may
name only the few classes it is made of, everything in it must be a tensor, and
every file it names must lie beside it.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from shardwright.ir.atomic_io import read_text_up_to
from shardwright.train.checkpoint.digests import TENSORS, Place, digest_at, place_of

INDEX = ".metadata"
Digests = Mapping[Place, str]  # of stored tensors
_LARGEST = 2**30  # bytes of an index; one of a million tiles has 200 MiB

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


class SafeReader(FileSystemReader):
    """Reads tensors of a checkpoint whose files have the given `sizes`, by name, in bytes.

    What a rank reads is compared with `digests`; None: there are none.
    """

    def __init__(
        self, folder: Path, sizes: Mapping[str, int], digests: Digests | None = None
    ) -> None:
        super().__init__(folder)
        self.folder, self.sizes, self.digests = folder, sizes, digests

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for; raises `DamageError` where bytes are not those written."""
        names = {place_of(self.storage_data[x.storage_index]): x for x in plan.items}
        if (place := self.damaged(names)) is not None:
            raise DamageError(
                f"{self.folder / place[0]} is damaged: {names[place].storage_index.fqn} is not what"
                " was written"
            )
        return super().read_data(plan, planner)

    def damaged(self, places: Iterable[Place]) -> Place | None:
        """The first place whose bytes are not those that were written; None without digests."""
        if self.digests is None:
            return None
        known = self.digests
        return next((x for x in places if digest_at(self.folder, x) != known.get(x)), None)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint; raises `DamageError` for any other content."""
        del args, kwargs
        return read_index(self.folder, self.sizes)


def read_index(folder: Path, sizes: Mapping[str, int]) -> Metadata:
    """The index in `folder`, checked; raises `DamageError` for what is no index of tensors."""
    try:
        if (size := (folder / INDEX).stat().st_size) > _LARGEST:
            raise CheckpointError(f"it has {size} bytes, too many for an index")
        found = _Unpickler(io.BytesIO((folder / INDEX).read_bytes())).load()
        _check(found, sizes)
    except CheckpointError as e:
        raise DamageError(f"{folder / INDEX}: {e}") from None
    except Exception as e:  # a damaged pickle may raise anything
        text = " ".join(f"{type(e).__name__}: {e}".split())
        raise DamageError(f"{folder / INDEX} is no index of a checkpoint ({text})") from e
    assert isinstance(found, Metadata)
    found.storage_meta = StorageMeta()
    return found


def read_digests(folder: Path) -> Digests:
    """The digests of the tensors in `folder`; raises `DamageError` for any other content."""
    file = folder / TENSORS
    try:
        rows = json.loads(read_text_up_to(file, _LARGEST))
        return {(name, offset, length): digest for name, offset, length, digest in rows}
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise DamageError(f"{file} has no digests of tensors: {e}") from e


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
