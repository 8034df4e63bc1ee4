"""Cuts a rank's part out of a global batch, and the part of each micro-batch out of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.ir.graph import Graph, Leaf, LeafKind
from shardwright.ir.layout import Atoms, Layout, Shard, atom_range, local_atoms, shape_of
from shardwright.program.instructions import Shape, flat, flat_dim
from shardwright.program.lower.micro_batches import micro_inputs
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.lower.stages import RECEIVED
from shardwright.rules.analysis import Analysis
from shardwright.runtime.device import to_device
from shardwright.tracing.arguments import BatchError as BatchError
from shardwright.tracing.arguments import CallForm

Cut = tuple[int, int, int]  # a dimension, and start and length of the tile along it


@dataclass
class InputPart:
    """A rank's part of the input `key`: the tiles at `coordinates`, one per micro-batch.

    Where micro-batches take different tiles, `layout` shards the input along
    the first axis of its mesh and the part is the tiles one after the other;
    else all take the same.
    """

    key: str
    atoms: Atoms
    layout: Layout
    coordinates: tuple[tuple[int, ...], ...]
    whole_shape: Shape = field(init=False)  # of the input in a global batch
    shape: Shape = field(init=False)  # of this rank's part
    _flat: Shape = field(init=False)  # of the input, each atom a dimension
    was_local: bool = field(init=False, default=False)  # whether a call passed this rank's part
    # What every step would find again: where micro-batches are cut, -1 if nowhere, and how each is.
    _cut_along: int = field(init=False)
    _cuts: tuple[tuple[Cut, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.coordinates, "an input has at least one tile"
        along = flat_dim(self.atoms, self.layout.placements[0])
        self._cut_along = along if len(self.coordinates) > 1 else -1
        self.whole_shape, self.shape = shape_of(self.atoms), self._part_shape()
        self._flat = flat(self.atoms)
        tiles = self.coordinates if self._cut_along >= 0 else self.coordinates[:1]
        self._cuts = tuple(_cuts(self.atoms, self.layout, at) for at in tiles)

    def _tile(self, number: int) -> Atoms:
        return local_atoms(self.atoms, self.layout, self.coordinates[number])

    def _part_shape(self) -> Shape:
        if self._cut_along < 0:
            return shape_of(self._tile(0))
        first = self.layout.placements[0]
        assert isinstance(first, Shard)
        tiles = [self._tile(i) for i in range(len(self.coordinates))]
        length = sum(tile[first.dim][first.atom] for tile in tiles)
        sizes = list(tiles[0][first.dim])
        sizes[first.atom] = length
        return shape_of((*tiles[0][: first.dim], tuple(sizes), *tiles[0][first.dim + 1 :]))

    def of(self, given: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's part of a global batch's argument `name`; returns a local part unchanged."""
        if self.shape == self.whole_shape == given.shape:
            return given
        if given.shape == self.whole_shape:
            whole = given if given.shape == self._flat else given.reshape(self._flat)
            tiles = [_narrowed(whole, cuts) for cuts in self._cuts]
            part = tiles[0] if len(tiles) == 1 else torch.cat(tiles, self._cut_along)
            return part if part.shape == self.shape else part.reshape(self.shape)
        if given.shape == self.shape:
            self.was_local = True
            return given
        raise BatchError(_other_shape(name, given, self.whole_shape, self.shape))

    def micro_batch(self, part: torch.Tensor, number: int) -> torch.Tensor:
        """The tile of micro-batch `number` in this rank's part."""
        along = self._cut_along
        if along < 0:
            return part
        tiles = [flat(self._tile(i)) for i in range(number + 1)]
        start, tile = sum(sizes[along] for sizes in tiles[:number]), tiles[number]
        whole = part.reshape(*tile[:along], -1, *tile[along + 1 :])
        return whole.narrow(along, start, tile[along]).reshape(shape_of(self._tile(number)))


def input_parts(
    graph: Graph, analysis: Analysis, layouts: Mapping[str, Layout], at: tuple[tuple[int, ...], ...]
) -> dict[str, InputPart]:
    """A rank's part of each input, by path: the tiles at the coordinates `at`."""
    leaves: tuple[Leaf, ...] = graph.leaves_of(LeafKind.INPUT)
    return {
        leaf.keys[0]: InputPart(leaf.keys[0], analysis.atoms[leaf.name], layouts[leaf.name], at)
        for leaf in leaves
    }


def stage_inputs(staged: StagedGraph, index: int, rank: int) -> dict[str, InputPart]:
    """The part of the batch that the device at place `rank` of a group reads for a stage."""
    graph, decisions, micro = staged.parts[index].graph, staged.decisions, staged.micro
    layouts = micro_inputs(graph, staged.analysis, micro, decisions.mesh, decisions.tilings)
    at = tuple((i, *decisions.mesh.coordinate(rank)) for i in range(micro.count))
    parts = input_parts(graph, staged.analysis, layouts, at)
    return {key: part for key, part in parts.items() if not key.startswith(RECEIVED)}


def local_inputs(
    form: CallForm,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: Mapping[str, InputPart],
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """This rank's parts of a call's tensors by path, contiguous; each tensor is global or local.

    Parts of tensors on the CPU are copied to `device` without a wait (`to_device`).
    Raises `BatchError` for arguments that differ from the planned call, `form`. Arguments of which
    this rank has no part are also checked, so that all ranks raise the error.
    """
    given = form.inputs(args, kwargs, device)
    for key, shape in form.shapes.items():
        if key not in parts and tuple(given[key].shape) != shape:
            raise BatchError(_other_shape(form.names[key], given[key], shape))
    found = {key: part.of(given[key], form.names[key]).contiguous() for key, part in parts.items()}
    if device is None or device.type == "cpu":
        return found
    return {key: to_device(tile, device) for key, tile in found.items()}


def replica_of(parts: Mapping[str, InputPart], whole: int, part: int) -> tuple[int, int]:
    """The number of this rank's part, `part` rows of `whole`, and how many parts there are.

    Ranks with the same number read the same rows. Raises `BatchError` where parts are no whole
    rows, or not as many on each rank.
    """
    numbers = set()
    for one in parts.values():
        if one.whole_shape[:1] != (whole,):
            continue
        if whole % part or one.shape != (part, *one.whole_shape[1:]):
            raise BatchError(
                f"the plan gives this rank {list(one.shape)} of {list(one.whole_shape)}, no equal"
                " number of whole rows; pass the global batch, or what local_batch returns"
            )
        rows = torch.arange(whole).view(-1, *[1] * (len(one.shape) - 1)).expand(one.whole_shape)
        mine = one.of(rows, one.key).reshape(part, -1)[:, 0].tolist()
        run = next((i for i in range(1, part) if mine[i] != mine[i - 1] + 1), part)
        numbers.add(mine[0] // run)  # micro-batches have a run of rows each
    if len(numbers) > 1:
        raise BatchError(
            "the plan gives this rank other rows of some inputs; pass the global batch"
        )
    return (numbers.pop() if numbers else 0), whole // part


def _other_shape(name: str, given: torch.Tensor, *shapes: Shape) -> str:
    planned = f"{list(shapes[0])}"
    if len(set(shapes)) > 1:
        planned += f" (or this rank's part of it, {list(shapes[1])})"
    return (
        f"the argument {name} has shape {list(given.shape)}; the plan is for a"
        f" global batch of {planned}: pad the batch, or plan for its shape"
    )


def cut(
    whole: torch.Tensor, atoms: Atoms, layout: Layout, coordinate: tuple[int, ...]
) -> torch.Tensor:
    """The tile, at `coordinate`, of a tensor in its atoms' shape; a view."""
    return _narrowed(whole, _cuts(atoms, layout, coordinate))


def _cuts(atoms: Atoms, layout: Layout, coordinate: tuple[int, ...]) -> tuple[Cut, ...]:
    """The dimensions, of a tensor in its atoms' shape, that the tile at `coordinate` cuts."""
    found = []
    for d, sizes in enumerate(atoms):
        for a, size in enumerate(sizes):
            local = atom_range(size, (d, a), layout, coordinate)
            if len(local) < size:
                found.append((sum(map(len, atoms[:d])) + a, local.start, len(local)))
    return tuple(found)


def _narrowed(whole: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    for dim, start, length in cuts:
        whole = whole.narrow(dim, start, length)
    return whole
