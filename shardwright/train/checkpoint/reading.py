"""Reads `torch.distributed.checkpoint` files without running code from them.

torch reads a checkpoint's tensors with `weights_only`, but its other values and its index with
pickle, which may run code. Here every value must be a tensor, and `dcp_index` reads the index.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from shardwright.ir.atomic_io import read_text_up_to
from shardwright.runtime.weight_files.dcp_index import INDEX as INDEX
from shardwright.runtime.weight_files.dcp_index import LARGEST_INDEX, DamageError, read_index
from shardwright.runtime.weight_files.dcp_index import CheckpointError as CheckpointError
from shardwright.train.checkpoint.digests import TENSORS, Place, digest_at, place_of

Digests = Mapping[Place, str]  # of stored tensors


class SafeReader(FileSystemReader):
    """Reads the tensors of a checkpoint in `folder`.

    `sizes` are the bytes of its files by name. Tensors that a rank reads are compared with
    `digests`; None: they are not checked.
    """

    def __init__(
        self, folder: Path, sizes: Mapping[str, int], digests: Digests | None = None
    ) -> None:
        super().__init__(folder)
        self.folder, self.sizes, self.digests = folder, sizes, digests

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of `plan`; raises `DamageError` if the bytes of one have changed."""
        names = {place_of(self.storage_data[x.storage_index]): x for x in plan.items}
        if (place := self.damaged(names)) is not None:
            raise DamageError(
                f"{self.folder / place[0]} is damaged: {names[place].storage_index.fqn} is not what"
                " was written"
            )
        return super().read_data(plan, planner)

    def damaged(self, places: Iterable[Place]) -> Place | None:
        """The first place whose bytes have changed; None if there is none, or without digests."""
        if self.digests is None:
            return None
        known = self.digests
        return next((x for x in places if digest_at(self.folder, x) != known.get(x)), None)

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
