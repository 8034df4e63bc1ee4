"""Files of tensors that are read by ranges: safetensors, `torch.save`, and DCP folders."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shardwright.runtime.deferred.chunks import CHUNK
from shardwright.runtime.deferred.ranges import Ranges, narrowed
from shardwright.runtime.weight_files.dcp_index import (
    INDEX,
    CheckpointError,
    read_index,
    unreadable,
)
from shardwright.runtime.weight_files.safetensors_paths import readable, weight_files

DTYPES = {  # of safetensors
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"BOOL": torch.bool, "C64": torch.complex64},
}


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFiles(ABC):
    """Tensors in files, by key."""

    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def part(self, key: str, ranges: Ranges) -> torch.Tensor:
        """The elements within `ranges`, which may be a view of mapped memory of the file."""

    def read(self, key: str, ranges: Ranges) -> torch.Tensor:
        """The elements within `ranges`, contiguous, read in chunks of rows."""
        stored = self.tensors[key]
        found = torch.empty([stop - start for start, stop in ranges], dtype=stored.dtype)
        if not ranges:
            return found.copy_(self.part(key, ranges))
        row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        first, last = ranges[0]
        rows = max(1, CHUNK // max(1, row))
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            part = self.part(key, ((start, stop), *ranges[1:]))
            found[start - first : stop - first].copy_(part)
            del part
        return found


@final
class SafetensorsFiles(TensorFiles):
    """A safetensors file, or the files of a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self.homes: dict[str, Path] = {}
        self.tensors = found = {}
        for file in weight_files(path):
            with readable(file), _open(file) as opened:
                for key in opened.keys():  # noqa: SIM118  # it is no mapping
                    if key in self.homes:
                        raise CheckpointError(f"{key} is in {self.homes[key]} and in {file}")
                    part, self.homes[key] = opened.get_slice(key), file
                    dtype = DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise CheckpointError(f"{file}: {key} has dtype {part.get_dtype()}")
                    found[key] = StoredTensor(tuple(part.get_shape()), dtype)

    def part(self, key: str, ranges: Ranges) -> torch.Tensor:
        file = self.homes[key]
        with readable(file), _open(file) as opened:
            if not ranges:
                return opened.get_tensor(key)  # type: ignore[no-any-return]
            sliced = opened.get_slice(key)
            return sliced[tuple(slice(*one) for one in ranges)]  # type: ignore[no-any-return]


@final
class TorchFile(TensorFiles):
    """A state dict that `torch.save` wrote; nested dicts have keys with dots between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values, self.mapped = self._read(), 0
        self.tensors = {k: StoredTensor(tuple(t.shape), t.dtype) for k, t in self.values.items()}

    def part(self, key: str, ranges: Ranges) -> torch.Tensor:
        # Pages that were read count as memory of this process until the file is mapped anew.
        row = math.prod(self.tensors[key].shape[1:]) * self.tensors[key].dtype.itemsize
        size = row * (ranges[0][1] - ranges[0][0] if ranges else 1)
        if self.mapped + size > CHUNK:
            self.values, self.mapped = {}, 0
            self.values = self._read()
        self.mapped += size
        return narrowed(self.values[key], ranges)

    def _read(self) -> dict[str, torch.Tensor]:
        try:
            state = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        except OSError as e:
            raise CheckpointError(f"cannot read {self.path}: {e.strerror or e}") from e
        except Exception as e:  # damaged bytes may raise anything
            raise CheckpointError(
                f"{self.path} is no file of tensors that torch.save wrote: {unreadable(e)}"
            ) from e
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{self.path} holds a {type(state).__name__}, no state dict")
        return dict(_flat(state))


@final
class DcpFolder(TensorFiles):
    """A folder that `torch.distributed.checkpoint` wrote; parts of a tensor are read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        self.index = read_index(path, sizes)
        self.tensors = {
            key: StoredTensor(tuple(kind.size), kind.properties.dtype)
            for key, kind in self.index.state_dict_metadata.items()
            if isinstance(kind, TensorStorageMetadata)
        }

    def part(self, key: str, ranges: Ranges) -> torch.Tensor:
        raise AssertionError("`read` reads the parts that were stored")

    def read(self, key: str, ranges: Ranges) -> torch.Tensor:
        kind = self.index.state_dict_metadata[key]
        assert isinstance(kind, TensorStorageMetadata)
        found = torch.empty([stop - start for start, stop in ranges], dtype=kind.properties.dtype)
        missing = found.numel()
        for number, chunk in enumerate(kind.chunks):
            starts = [max(lo, at) for (lo, _), at in zip(ranges, chunk.offsets, strict=True)]
            stops = [
                min(hi, at + size)
                for (_, hi), at, size in zip(ranges, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            within = tuple(
                (a - at, b - at) for a, b, at in zip(starts, stops, chunk.offsets, strict=True)
            )
            there = tuple(
                (a - lo, b - lo) for a, b, (lo, _) in zip(starts, stops, ranges, strict=True)
            )
            part = narrowed(self._chunk(key, chunk.offsets, number), within)
            narrowed(found, there).copy_(part)
            missing -= part.numel()
        if missing:
            raise CheckpointError(f"{self.path} has not all elements of {key}")
        return found

    def _chunk(self, key: str, offsets: torch.Size, number: int) -> torch.Tensor:
        at = self.index.storage_data.get(MetadataIndex(key, offsets, number))
        if at is None:
            raise CheckpointError(f"{self.path} does not say where a part of {key} lies")
        try:
            with open(self.path / at.relative_path, "rb") as file:
                file.seek(at.offset)
                data = io.BytesIO(file.read(at.length))
            value = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as e:  # damaged bytes may raise anything
            raise CheckpointError(f"cannot read {key} in {self.path}: {unreadable(e)}") from e
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{key} in {self.path} is a {type(value).__name__}, no tensor")
        return value.detach()


def open_files(path: Path) -> TensorFiles:
    """The tensors in a file or folder, of which none is read yet.

    Raises `CheckpointError` for a path that is none of the known kinds.
    """
    if not path.exists():
        raise CheckpointError(f"there is no {path}")
    if path.is_dir():
        return DcpFolder(path) if (path / INDEX).exists() else SafetensorsFiles(path)
    if not path.is_file():  # reading a pipe may never end
        raise CheckpointError(f"cannot read {path}: it is no regular file")
    return SafetensorsFiles(path) if path.suffix == ".safetensors" else TorchFile(path)


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as e:
        raise CheckpointError("safetensors is not installed: pip install 'shardwright[hf]'") from e
    return safe_open(file, framework="pt")


def _flat(state: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    found = []
    for key, value in state.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found.append((f"{prefix}{key}", value))
    return found
