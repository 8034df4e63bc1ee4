"""Digests of stored bytes, written with a checkpoint and compared when it is read.

The digest is XXH3 with 128 bits. It detects damage, not forgery: `reading.py` makes sure that
reading a checkpoint runs no code.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.ir.atomic_io import write_atomically

TENSORS = "digests.json"
_CHUNK = 2**22  # bytes read at a time

Place = tuple[str, int, int]  # of a stored tensor: file, offset and length in bytes


def digest_of_file(path: str | os.PathLike[str]) -> str:
    """The digest of a whole file."""
    with open(path, "rb") as file:
        return _digest(file, 0, os.fstat(file.fileno()).st_size)


def digest_of_text(text: str) -> str:
    """The digest of a text in UTF-8."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def digest_of_bytes(data: bytes) -> str:
    """The digest of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_at(folder: Path, place: Place) -> str:
    """The digest of one stored tensor, or of the rest of the file if that is shorter."""
    name, offset, length = place
    with open(folder / name, "rb") as file:
        return _digest(file, offset, length)


def _digest(file: BinaryIO, offset: int, length: int) -> str:
    found = xxhash.xxh3_128()
    file.seek(offset)
    while length > 0 and (data := file.read(min(length, _CHUNK))):
        found.update(data)
        length -= len(data)
    return found.hexdigest()


@dataclass(frozen=True)
class _Digested(WriteResult):
    """A tile of a tensor that one rank has written, with its digest."""

    digest: str = ""


@final
class DigestWriter(FileSystemWriter):
    """Writes a checkpoint's tensors and, in the file `digests.json`, their digests."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; the results carry their digests to the coordinator."""
        found: list[WriteResult] = []
        for one in super().write_data(plan, planner).wait():
            digest = digest_at(Path(self.path), place_of(one.storage_data))
            found.append(_Digested(one.index, one.size_in_bytes, one.storage_data, digest))
        future: Future[list[WriteResult]] = Future()
        future.set_result(found)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the digests, on the coordinator."""
        super().finish(metadata, results)
        digests = [
            [*place_of(one.storage_data), one.digest]
            for of_rank in results
            for one in of_rank
            if isinstance(one, _Digested)
        ]
        write_atomically(Path(self.path) / TENSORS, json.dumps(digests))


def place_of(stored: Any) -> Place:
    """The file, offset and length of a tensor, from the entry of an index."""
    return str(stored.relative_path), int(stored.offset), int(stored.length)
