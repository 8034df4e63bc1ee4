"""Routing of a mixture's rows: the devices that hold each expert, along every sharded axis."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from shardwright.ir.layout import Layout, Shard, atom_range

Owners = tuple[int, ...]  # of each expert, the coordinate of the devices that hold it


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of one device among those of others.

    It holds `length` of them from `start` on. Along the axis of each of `hops`, outermost first,
    rows are sent to the device that holds their expert. `split` says which experts lie in which
    tile along the axes that cut experts but not tokens, all of them taken together: devices
    there have the same tokens, and each works on the rows of its own tile.
    """

    start: int
    length: int
    hops: tuple[tuple[str, Owners], ...]
    split: Owners

    def __str__(self) -> str:
        return f"routed over {' '.join(axis for axis, _ in self.hops)}" if self.hops else ""


def routing(
    tokens: Layout, experts: Layout, size: int, local_experts: tuple[int, int]
) -> Routing | None:
    """The routing of rows to the `size` experts; None where every device has all of them.

    `tokens` is how the tokens lie and `experts` how the weights do, both cut in their first
    dimension; `local_experts` is the first expert of this device, and how many it has.
    """
    mesh = experts.mesh
    cut = [axis for axis, placement in enumerate(experts.placements) if placement == Shard(0)]
    if local_experts[1] == size or not cut:
        return None
    owners = [[0] * size for _ in cut]
    for tile in product(*(range(mesh.shape[axis]) for axis in cut)):
        coordinate = [0] * len(mesh.axes)
        for axis, at in zip(cut, tile, strict=True):
            coordinate[axis] = at
        for expert in atom_range(size, (0, 0), experts, tuple(coordinate)):
            for owner, at in zip(owners, tile, strict=True):
                owner[expert] = at
    hops: list[tuple[str, Owners]] = []
    split = (0,) * size
    for axis, owner in zip(cut, owners, strict=True):
        placement = tokens.placements[axis]
        if isinstance(placement, Shard) and placement.dim == 0:
            hops.append((mesh.names[axis], tuple(owner)))
        else:
            split = tuple(a * mesh.shape[axis] + b for a, b in zip(split, owner, strict=True))
    return Routing(*local_experts, tuple(hops), split)
