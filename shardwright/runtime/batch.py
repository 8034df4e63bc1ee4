"""A rank's part of a batch: what the program reads of a global batch, cut out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.capture.call import flatten
from shardwright.ir.layout import Atoms, Layout, atom_range, local_atoms, shape_of
from shardwright.lower.program import flat


class BatchError(ValueError):
    """A batch that is not what the module was captured with."""


def local_inputs(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layouts: Mapping[str, tuple[Atoms, Layout]],
    coordinate: tuple[int, ...],
) -> dict[str, torch.Tensor]:
    """By path, the tiles at `coordinate` of a call's tensors, each global or cut already.

    `layouts` has the inputs' atoms and layouts, by path. Raises `BatchError`
    for a tensor that is missing or has another shape than planned.
    """
    found = {}
    given = flatten(args, kwargs)
    for key, (atoms, layout) in layouts.items():
        if not isinstance(given.get(key), torch.Tensor):
            raise BatchError(f"the batch has no tensor {key}; it needs {', '.join(layouts)}")
        found[key] = _cut_input(key, given[key], atoms, layout, coordinate)
    return found


def cut(
    whole: torch.Tensor, atoms: Atoms, layout: Layout, coordinate: tuple[int, ...]
) -> torch.Tensor:
    """The tile, at `coordinate`, of a tensor in its atoms' shape; a view."""
    dim = 0
    for d, sizes in enumerate(atoms):
        for a, size in enumerate(sizes):
            held = atom_range(size, (d, a), layout, coordinate)
            if len(held) < size:
                whole = whole.narrow(dim, held.start, len(held))
            dim += 1
    return whole


def _cut_input(
    key: str, given: torch.Tensor, atoms: Atoms, layout: Layout, coordinate: tuple[int, ...]
) -> torch.Tensor:
    tile = local_atoms(atoms, layout, coordinate)
    if tuple(given.shape) == shape_of(atoms):
        return cut(given.reshape(flat(atoms)), atoms, layout, coordinate).reshape(shape_of(tile))
    if tuple(given.shape) == shape_of(tile):
        return given
    raise BatchError(
        f"{key} has shape {tuple(given.shape)}; the plan is for a global batch of"
        f" {shape_of(atoms)} (or this rank's part of it, {shape_of(tile)}): pad the batch, or plan"
        " for its shape"
    )
