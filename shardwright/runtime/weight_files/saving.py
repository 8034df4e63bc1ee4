"""Writes safetensors files of whole tensors from the tiles of all ranks, which share a file system.

Each rank writes its tiles into a file of its own. Then each output file is put together by one
rank, a chunk of rows at a time, so that no rank has a whole tensor, and no two write one file.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from shardwright.ir.atomic_io import sync_folder, write_atomically
from shardwright.runtime.deferred.chunks import CHUNK, scratch
from shardwright.runtime.deferred.ranges import Ranges
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.safetensors_paths import INDEX, SUFFIX, WEIGHTS
from shardwright.runtime.weight_files.tensor_files import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
T = TypeVar("T")


@dataclass(frozen=True)
class _Tile:
    """A tile in the file of a rank; its elements are contiguous there."""

    rank: int
    offset: int  # bytes
    ranges: Ranges


@dataclass(frozen=True)
class _Whole:
    """A tensor of an output file, and the tiles that it is put together from."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[_Tile, ...]

    @property
    def item(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item


def save_sharded(
    tensors: Mapping[str, torch.Tensor],
    order: Sequence[str],
    folder: str | os.PathLike[str],
    shard_bytes: int,
) -> None:
    """Write `model.safetensors`, or several files and their index; every rank calls it.

    Args:
        tensors: those of this rank by key: DTensors, or equal tensors on all ranks that have them.
        order: all keys, in the order of the files.
        folder: on a file system that all ranks share.
        shard_bytes: the size of a file; a larger tensor has one of its own.

    Raises:
        CheckpointError: on all ranks, where one cannot write, or a key is on none.
    """
    target = Path(folder)
    part = target / ".tiles"
    rank, world = _place()

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

    _together(target, begin)
    mine = _together(target, lambda: _write_tiles(tensors, part / f"{rank}", rank))
    every = _gathered(mine)

    def arrange() -> None:
        if rank == 0:
            files = _files(_wholes(every, order, target), shard_bytes)
            table = [[asdict(one) for one in file] for file in files]
            (part / "files.json").write_text(json.dumps(table))

    _together(target, arrange)

    def assemble() -> list[list[_Whole]]:
        files = _read_table(part / "files.json")
        for number in range(rank, len(files), world):
            _write_file(part / f"out-{number}", files[number], part)
        return files

    files = _together(target, assemble)

    def publish() -> None:
        if rank == 0:
            _publish(target, part, files)

    _together(target, publish)


def _publish(target: Path, part: Path, files: Sequence[Sequence[_Whole]]) -> None:
    """Replace the weights in `target`: at each moment it has all of the old ones or of the new.

    Readers prefer `model.safetensors` to an index, so renaming or deleting it is the moment, and
    among several files the renaming of the index, whose files then have other names than the old.
    """
    old = {path.name for path in target.glob(f"model-*-of-*{SUFFIX}")}
    names = _free_names(len(files), old) if len(files) > 1 else [WEIGHTS]
    for number, name in enumerate(names):
        os.replace(part / f"out-{number}", target / name)
    sync_folder(target)
    if len(files) > 1:
        pairs = zip(files, names, strict=True)
        index = {
            "metadata": {"total_size": sum(one.nbytes for file in files for one in file)},
            "weight_map": {one.key: name for file, name in pairs for one in file},
        }
        write_atomically(target / INDEX, json.dumps(index, indent=2))
    (target / (WEIGHTS if len(files) > 1 else INDEX)).unlink(missing_ok=True)
    sync_folder(target)
    for name in sorted(old.difference(names)):
        (target / name).unlink(missing_ok=True)
    shutil.rmtree(part)


def _free_names(count: int, taken: Container[str]) -> list[str]:
    """Names for so many files, all of one kind, none of which is taken."""
    kinds = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    for kind in kinds:
        names = [f"model{kind}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]
        if not any(name in taken for name in names):
            break
    return names


def _write_tiles(
    tensors: Mapping[str, torch.Tensor], path: Path, rank: int
) -> dict[str, tuple[str, tuple[int, ...], Ranges, int]]:
    """Write the tiles that this rank has first; key -> dtype, shape, ranges, offset in the file."""
    found: dict[str, tuple[str, tuple[int, ...], Ranges, int]] = {}
    with open(path, "wb") as file:
        for key, tensor in tensors.items():
            local, ranges = _tile(tensor.detach())
            if local is None:
                continue
            if local.dtype not in _NAMES:
                raise CheckpointError(f"safetensors files have no {local.dtype}, which {key} is")
            found[key] = _NAMES[local.dtype], tuple(tensor.shape), ranges, file.tell()
            _write(file, local)
    return found


def _tile(tensor: torch.Tensor) -> tuple[torch.Tensor | None, Ranges]:
    """This rank's tile, or None where another rank has the same; and its ranges."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple((0, size) for size in tensor.shape)
    at = tensor.device_mesh.get_coordinate()
    assert at is not None, "a rank has parameters of its own meshes alone"
    ranges, first = [(0, size) for size in tensor.shape], True
    for placement, index, parts in zip(
        tensor.placements, at, tensor.device_mesh.shape, strict=True
    ):
        if isinstance(placement, Shard):
            start, stop = ranges[placement.dim]
            size = -(-(stop - start) // parts)
            low = min(start + index * size, stop)
            ranges[placement.dim] = low, min(low + size, stop)
        else:
            first = first and index == 0
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(stop - start for start, stop in ranges), (
        "a chunk, as torch's"
    )
    return local if first else None, tuple(ranges)


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Append the elements in order, in chunks of rows."""
    if not tensor.dim():
        tensor = tensor.reshape(1)
    rows = max(1, CHUNK // max(1, prod(tensor.shape[1:]) * tensor.element_size()))
    for start in range(0, len(tensor), rows):
        part = tensor[start : start + rows].cpu().contiguous()
        file.write(part.reshape(-1).view(torch.uint8).numpy().data)


def _wholes(
    every: Sequence[Mapping[str, tuple[str, tuple[int, ...], Ranges, int]]],
    order: Sequence[str],
    target: Path,
) -> Iterator[_Whole]:
    """The tensors of all files with their tiles, each once."""
    for key in order:
        tiles: dict[Ranges, _Tile] = {}
        dtype, shape = "", tuple[int, ...]()
        for rank, mine in enumerate(every):
            if key in mine:
                dtype, shape, ranges, offset = mine[key]
                tiles.setdefault(ranges, _Tile(rank, offset, ranges))
        count = sum(prod(stop - start for start, stop in ranges) for ranges in tiles)
        if not tiles or count != prod(shape):
            raise CheckpointError(f"cannot write {target}: no rank has all of {key}")
        yield _Whole(key, dtype, shape, tuple(tiles.values()))


def _files(wholes: Iterator[_Whole], shard_bytes: int) -> list[list[_Whole]]:
    """The tensors of each file, in order."""
    files: list[list[_Whole]] = [[]]
    size = 0
    for one in wholes:
        if files[-1] and size + one.nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.nbytes
    return files


def _read_table(path: Path) -> list[list[_Whole]]:
    def whole(row: dict[str, Any]) -> _Whole:
        tiles = tuple(
            _Tile(t["rank"], t["offset"], tuple((a, b) for a, b in t["ranges"]))
            for t in row["tiles"]
        )
        return _Whole(row["key"], row["dtype"], tuple(row["shape"]), tiles)

    return [[whole(row) for row in file] for file in json.loads(path.read_text())]


def _write_file(path: Path, wholes: Sequence[_Whole], part: Path) -> None:
    """A safetensors file: the size of the header, the header, and all elements."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in wholes:
        offsets = [at, at + one.nbytes]
        header[one.key] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": offsets}
        at += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in wholes:
            _assemble(file, one, part)
        file.flush()
        os.fsync(file.fileno())


def _assemble(file: BinaryIO, one: _Whole, part: Path) -> None:
    """Append a tensor, a chunk of rows at a time, read from the files of tiles."""
    shape = one.shape or (1,)
    row = prod(shape[1:]) * one.item
    rows = max(1, CHUNK // max(1, row))
    dtype = DTYPES[one.dtype]
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        whole = scratch((stop - start) * prod(shape[1:]), dtype).view(stop - start, *shape[1:])
        for tile in one.tiles:
            ranges = tile.ranges or ((0, 1),)
            low, high = max(start, ranges[0][0]), min(stop, ranges[0][1])
            sizes = [b - a for a, b in ranges[1:]]
            if low >= high or not prod(sizes):
                continue
            values = scratch((high - low) * prod(sizes), dtype).view(high - low, *sizes)
            with open(part / f"{tile.rank}", "rb") as given:
                given.seek(tile.offset + (low - ranges[0][0]) * prod(sizes) * one.item)
                data = values.reshape(-1).view(torch.uint8).numpy().data
                if given.readinto(data) != len(data):
                    raise CheckpointError(f"{part / str(tile.rank)} ends before {one.key} does")
            place = tuple(slice(a, b) for a, b in ranges[1:])
            whole[(slice(low - start, high - start), *place)] = values
        file.write(whole.reshape(-1).view(torch.uint8).numpy().data)


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gathered(mine: T) -> list[T]:
    """The values of all ranks on rank 0; an empty list on others."""
    rank, world = _place()
    if world == 1:
        return [mine]
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, every, dst=0)
    return every or []


def _together(target: Path, work: Callable[[], T]) -> T:
    """Do `work` on all ranks and wait for it; an error on one of them is raised on all."""
    error, result, cause = "", None, None
    try:
        result = work()
    except OSError as e:
        error = f"cannot write {target}: {e.strerror or e}; choose another path"
    except CheckpointError as e:
        error = str(e)
    except Exception as e:  # else the other ranks would wait for this one
        error, cause = f"cannot write {target}: {type(e).__name__}: {e}", e
    _, world = _place()
    if world > 1:
        every = [""] * world
        dist.all_gather_object(every, error)
        error = next((text for text in every if text), "")
    if error:
        raise CheckpointError(error) from cause
    return result  # type: ignore[return-value]
