"""Reads `torch.distributed.checkpoint` files without running code from them.

torch reads a checkpoint's tensors with `weights_only`, but its other values and its index with
pickle, which may run code. Here every value must be a tensor, and `dcp_index` reads the index.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardwright.ir.atomic_io import read_text_up_to
from shardwright.runtime.deferred.ranges import narrowed
from shardwright.runtime.weight_files.dcp_index import INDEX as INDEX
from shardwright.runtime.weight_files.dcp_index import LARGEST_INDEX, read_index, unreadable
from shardwright.runtime.weight_files.dcp_index import CheckpointError as CheckpointError
from shardwright.runtime.weight_files.dcp_index import DamageError as DamageError
from shardwright.train.checkpoint.digests import TENSORS, Place, digest_of_bytes, place_of

Digests = Mapping[Place, str]  # of stored tensors


class SafeReader(FileSystemReader):
    """Reads the tensors of a checkpoint in `folder`, each stored tile once and whole.

    `sizes` are the bytes of its files by name. The bytes of each tile are compared with `digests`
    before they are unpickled; None: they are not compared.
    """

    def __init__(
        self, folder: Path, sizes: Mapping[str, int], digests: Digests | None = None
    ) -> None:
        super().__init__(folder)
        self.folder, self.sizes, self.digests = folder, sizes, digests

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of `plan`; raises `DamageError` for a tile that is not as written."""
        wanted: dict[Place, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(place_of(self.storage_data[item.storage_index]), []).append(item)
        for place, items in sorted(wanted.items()):
            stored = self.tile(place, items[0].storage_index.fqn)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                pairs = zip(item.storage_offsets, item.lengths, strict=True)
                ranges = tuple((start, start + length) for start, length in pairs)
                target.copy_(narrowed(stored, ranges))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tile(self, place: Place, name: str) -> torch.Tensor:
        """The stored tile of the tensor `name`; raises `DamageError` if it cannot be read."""
        file, offset, length = place
        try:
            with open(self.folder / file, "rb") as opened:
                opened.seek(offset)
                data = opened.read(length)
            if self.digests is not None and digest_of_bytes(data) != self.digests.get(place):
                raise ValueError("its digest is another")
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"it is a {type(value).__name__}")
        except Exception as e:  # damaged bytes may raise anything
            where = f"{self.folder / file} is damaged: {name}"
            raise DamageError(f"{where} is not what was written ({unreadable(e)})") from e
        return value.detach()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's index; raises `DamageError` if it is not a valid index."""
        del args, kwargs
        return read_index(self.folder, self.sizes)


def read_digests(folder: Path) -> Digests:
    """The digests of the tensors in `folder`; raises `DamageError` if they cannot be read."""
    file = folder / TENSORS
    try:
        rows = json.loads(read_text_up_to(file, LARGEST_INDEX))
        return {(name, offset, length): digest for name, offset, length, digest in rows}
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise DamageError(f"{file} has no digests of tensors: {e}") from e
