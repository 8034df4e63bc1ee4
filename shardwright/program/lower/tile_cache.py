"""Caches a device's tiles of tensors and its redistributions, computed once for equal layouts."""

from __future__ import annotations

from typing import NamedTuple, final

from shardwright.ir.layout import Atoms, Layout, local_atoms, shape_of
from shardwright.program.instructions import Move, Shape, flat, moves


class Tile(NamedTuple):
    """Shapes of a part of a tensor: in the tensor's own dimensions, and as its atoms."""

    shape: Shape
    atoms: Shape


@final
class TileCache:
    """Tiles and moves of the device at `coordinate`, which repeated layers ask for again."""

    def __init__(self, coordinate: tuple[int, ...]) -> None:
        self.coordinate = coordinate
        self._tiles: dict[tuple[Atoms, Layout], Tile] = {}
        self._moves: dict[tuple[Atoms, Layout, Layout], tuple[Move, ...]] = {}

    def tile(self, atoms: Atoms, layout: Layout) -> Tile:
        """The device's tile of a tensor of these atoms under this layout."""
        key = atoms, layout
        if (found := self._tiles.get(key)) is None:
            local = local_atoms(atoms, layout, self.coordinate)
            found = self._tiles[key] = Tile(shape_of(local), flat(local))
        return found

    def moves(self, atoms: Atoms, src: Layout, dst: Layout) -> tuple[Move, ...]:
        """The steps of such a tensor from `src` to `dst`, as the device takes them."""
        key = atoms, src, dst
        if (found := self._moves.get(key)) is None:
            found = self._moves[key] = moves(atoms, src, dst, self.coordinate)
        return found
