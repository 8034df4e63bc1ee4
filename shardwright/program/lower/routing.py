"""Routing of a mixture's rows: the devices that hold each expert, along every sharded axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from shardwright.ir.layout import Layout, Shard, atom_range

Owners = tuple[int, ...]  # of each expert, the coordinate of the devices that hold it


class Hop(NamedTuple):
    """One exchange of rows along a mesh axis.

    Attributes:
        axis: its name.
        to: of each expert, the position along the axis to which rows for it go.
        is_last: whether that is the position of the devices that hold it.
    """

    axis: str
    to: Owners
    is_last: bool


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of one device among those of others.

    It holds `length` of them from `start` on. Rows are sent to the devices that hold their experts
    in `hops`, those along the outermost axis first. `split` says which experts lie in which
    tile along the axes that cut experts but not tokens, all of them taken together: devices
    there have the same tokens, and each works on the rows of its own tile.
    """

    start: int
    length: int
    hops: tuple[Hop, ...]
    split: Owners

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which rows are sent."""
        return tuple(dict.fromkeys(hop.axis for hop in self.hops))

    def __str__(self) -> str:
        if not self.hops:
            return ""
        by_host = {hop.axis for hop in self.hops if not hop.is_last}
        words = (f"{axis} (by host)" if axis in by_host else axis for axis in self.axes)
        return f"routed over {' '.join(words)}"


def routing(
    tokens: Layout,
    experts: Layout,
    size: int,
    local_experts: tuple[int, int],
    near: Mapping[str, int],
) -> Routing | None:
    """The routing of rows to the `size` experts; None where every device has all of them.

    `tokens` is how the tokens lie and `experts` how the weights do, both cut in their first
    dimension; `local_experts` is the first expert of this device, and how many it has. `near` are
    numbers of devices that share a host (`ir/hosts.py`), of the axes along which rows go to hosts
    first.
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
    hops: list[Hop] = []
    split = (0,) * size
    for axis, owner in zip(cut, owners, strict=True):
        placement = tokens.placements[axis]
        if isinstance(placement, Shard) and placement.dim == 0:
            name, here = mesh.names[axis], owner[local_experts[0]]
            hops += _hops(name, tuple(owner), here, near.get(name, 1))
        else:
            split = tuple(a * mesh.shape[axis] + b for a, b in zip(split, owner, strict=True))
    return Routing(*local_experts, tuple(hops), split)


def _hops(axis: str, owners: Owners, here: int, near: int) -> Iterator[Hop]:
    """The hops along an axis of the device at position `here`, with `near` on each host."""
    if near > 1:
        to_hosts = tuple(owner // near * near + here % near for owner in owners)
        yield Hop(axis, to_hosts, is_last=False)
    yield Hop(axis, owners, is_last=True)
