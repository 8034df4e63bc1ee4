"""Weights of a model in files: checked against the model, then read tile by tile."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

import torch
from torch import nn

from shardwright.runtime.deferred.ranges import Ranges
from shardwright.runtime.deferred.sources import TensorSources
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.tensor_files import StoredTensor, TensorFiles, open_files

Key = str | tuple[str, Sequence[int]]  # a key, or one and the order of its dimensions
Keys = Mapping[str, Key] | Callable[[str], Key]


@dataclass(frozen=True)
class StoredWeights:
    """Files with the weights of a model, under other keys or with other tensors beside them.

    Attributes:
        path: a safetensors file; a folder that `save_pretrained` wrote; a folder that
            `torch.distributed.checkpoint` wrote; or a state dict that `torch.save` wrote.
        keys: the key in the files of a name in the model: a function of the name, or a mapping of
            the names that differ. A pair of a key and an order of dimensions, as `("w", (1, 0))`,
            is read as `stored[key].permute(order)`.
        ignored: patterns, as `"optimizer.*"`, of keys in the files that the model has not, or has
            under another key too.
    """

    path: str | os.PathLike[str]
    keys: Keys | None = None
    ignored: Sequence[str] = ()

    def key(self, name: str) -> tuple[str, tuple[int, ...] | None]:
        """The key of `name` in the files, and the order of its dimensions there."""
        if self.keys is None:
            return name, None
        found = self.keys(name) if callable(self.keys) else self.keys.get(name, name)
        if isinstance(found, str):
            return found, None
        key, order = found
        return key, tuple(order)

    def ignores(self, key: str) -> bool:
        """Whether a pattern in `ignored` matches `key`."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignored)


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in the files."""

    key: str
    order: tuple[int, ...] | None

    def shape(self, stored: StoredTensor) -> tuple[int, ...] | None:
        """The shape in the model's order; None if the tensor has other dimensions than `order`."""
        if self.order is None:
            return stored.shape
        if sorted(self.order) != list(range(len(stored.shape))):
            return None
        return tuple(stored.shape[dim] for dim in self.order)

    def read(self, files: TensorFiles, ranges: Ranges) -> torch.Tensor:
        if self.order is None:
            return files.read(self.key, ranges)
        there = tuple(ranges[self.order.index(dim)] for dim in range(len(ranges)))
        return files.read(self.key, there).permute(self.order).contiguous()


@final
class StoredSources(TensorSources):
    """Values of the state dict of `model` in files; of its other buffers in `others`.

    Raises `CheckpointError`, before a tensor is read, for missing and unexpected keys, other shapes
    and dtypes that values would be rounded to; and where it is read, for a tied tensor that has
    different values under its keys.
    """

    def __init__(
        self, model: nn.Module, stored: StoredWeights, others: TensorSources | None
    ) -> None:
        self.others = others
        self.path = Path(stored.path)
        self.files = open_files(self.path)
        self.places: dict[str, tuple[_Place, ...]] = {}  # several of a tied tensor
        needed, unread = _by_tensor(model), dict.fromkeys(self.files.tensors)
        missing: list[str] = []
        wrong: list[str] = []
        for names, tensor in needed:
            places = [_Place(*stored.key(name)) for name in names]
            known = [place for place in places if place.key in self.files.tensors]
            if not known:
                missing.append(places[0].key)
                continue
            for place in known:  # all names of a tied tensor may be stored
                unread.pop(place.key, None)
                wrong += self._wrong(names[0], tensor, place)
            used = [place for place in known if not stored.ignores(place.key)] or known
            self.places.update((name, tuple(dict.fromkeys(used))) for name in names)
        extra = [key for key in unread if not stored.ignores(key)]
        for keys, what in ((missing, "has no"), (extra, "has, and the model has not,")):
            if keys:
                more = f" ({len(keys)} such keys)" if len(keys) > 1 else ""
                raise CheckpointError(
                    f"{self.path} is of another model: it {what} {keys[0]}{more}; name keys that"
                    " differ in StoredWeights(path, keys=..., ignored=...)"
                )
        if wrong:
            more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
            raise CheckpointError(f"{self.path}: {wrong[0]}{more}")

    def tile(self, name: str, tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        if (places := self.places.get(name)) is not None:
            first, *others = places
            found = first.read(self.files, ranges).to(tensor.dtype)
            for other in others:
                if not torch.equal(found, other.read(self.files, ranges).to(tensor.dtype)):
                    raise CheckpointError(
                        f"{self.path}: {first.key} and {other.key} have other values, and are one"
                        f" tensor, {name}, of the model; build a model that does not tie them, or"
                        " name the one to leave out in StoredWeights(path, ignored=...)"
                    )
            return found
        assert self.others is not None, f"{name} has no values, and was not missed"
        return self.others.tile(name, tensor, ranges)

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        if name in self.places:
            return True
        return self.others is not None and self.others.has(name, tensor)

    def digest(self, tensors: Mapping[str, torch.Tensor]) -> int:
        text = repr(sorted((key, str(value)) for key, value in self.files.tensors.items()))
        found = zlib.crc32(text.encode())
        others = {name: t for name, t in tensors.items() if name not in self.places}
        return found if self.others is None else found ^ self.others.digest(others)

    def _wrong(self, name: str, tensor: torch.Tensor, place: _Place) -> Iterator[str]:
        stored, shape = self.files.tensors[place.key], tuple(tensor.shape)
        if place.shape(stored) != shape:
            order = "" if place.order is None else f", read in the order {place.order}"
            yield f"{place.key} has shape {stored.shape}{order}; {name} of the model has {shape}"
        elif not _is_exact(stored.dtype, tensor.dtype):
            yield (
                f"{place.key} is {stored.dtype}, and values of {name} would be rounded to"
                f" {tensor.dtype}; build the model in {stored.dtype}"
            )


def _by_tensor(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors in the state dict of `model`, with all their names."""
    names: dict[int, list[str]] = {}
    found: dict[int, torch.Tensor] = {}
    persistent = set(model.state_dict())
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        if name in persistent:
            found[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    return [(names[number], tensor) for number, tensor in found.items()]


def _is_exact(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every number of one dtype is one of the other."""
    if stored is wanted:
        return True
    if not (stored.is_floating_point and wanted.is_floating_point) or stored.itemsize == 1:
        return False
    return torch.promote_types(stored, wanted) is wanted
