"""Tiles of a tensor on all ranks of a mesh, simulated in one process, and the tensor they make.

Written from the meaning of placements alone, axis by axis from the outside, so that it can judge
the code that moves tiles: of ours it uses only the names of placements.
"""

import torch

from shardwright.ir.layout import Partial, Replicate, Shard


def scatter(whole, atoms, layout, generator):
    """The tile of every rank, in the order of ranks; partial sums are random numbers.

    `whole` has one dimension per atom or per tensor dimension; tiles have the latter.
    """
    sizes = [size for dim in atoms for size in dim]
    tiles = [whole.reshape(sizes)]
    for placement, ways in zip(layout.placements, layout.mesh.shape, strict=True):
        tiles = [part for tile in tiles for part in _split(tile, placement, ways, atoms, generator)]
    return [_with_dims(tile, atoms) for tile in tiles]


def gather(tiles, atoms, layout):
    """The tensor that the tiles of all ranks make; replicas must be equal."""
    tiles = [_with_atoms(tile, atoms, at, layout) for at, tile in _ranks(tiles, layout)]
    for axis in reversed(range(len(layout.placements))):
        placement, ways = layout.placements[axis], layout.mesh.shape[axis]
        groups = [tiles[i : i + ways] for i in range(0, len(tiles), ways)]
        tiles = [_join(group, placement, atoms) for group in groups]
    (whole,) = tiles
    return _with_dims(whole, atoms)


def lengths(size, ways):
    """How many of `size` rows each of `ways` ranks has: as equal as `torch.chunk` makes them.

    >>> lengths(7, 3)
    [3, 3, 1]
    """
    longest = -(-size // ways)
    return [max(0, min(longest, size - rank * longest)) for rank in range(ways)]


def _split(tile, placement, ways, atoms, generator):
    match placement:
        case Replicate():
            return [tile] * ways
        case Shard():
            at = _flat(placement, atoms)
            return list(cut(tile, placement, ways, at))
        case Partial():
            if tile.dtype == torch.bool:  # whose sum is "or": every element is on one rank
                owner = torch.randint(ways, tile.shape, generator=generator)
                return [tile & (owner == rank) for rank in range(ways)]
            others = [
                torch.randint(9, tile.shape, generator=generator).to(tile.dtype)
                for _ in range(ways - 1)
            ]
            return [tile - sum(others), *others]


def cut(tile, placement, ways, at):
    """The part of each rank; in zigzag order halves of two tiles, one from either end."""
    tiles = tile.split(lengths(tile.shape[at], ways), at)
    if not placement.zigzag:
        return tiles
    halves = []
    for one in tiles:
        early = (one.shape[at] + 1) // 2
        halves += one.split([early, one.shape[at] - early], at)
    return [torch.cat([halves[rank], halves[-1 - rank]], at) for rank in range(ways)]


def join(tiles, placement, at):
    """What was cut into these parts."""
    joined = torch.cat(list(tiles), at)
    if not placement.zigzag:
        return joined
    order = torch.cat(cut(torch.arange(joined.shape[at]), placement, len(tiles), 0))
    return joined.index_select(at, order.argsort())


def _join(tiles, placement, atoms):
    match placement:
        case Replicate():
            for other in tiles[1:]:
                torch.testing.assert_close(
                    other, tiles[0], rtol=1e-9, atol=1e-9, equal_nan=True, msg="replicas differ"
                )
            return tiles[0]
        case Shard():
            at = _flat(placement, atoms)
            return join(tiles, placement, at)
        case Partial():
            return torch.stack(tiles).sum(0).to(tiles[0].dtype)


def _flat(shard, atoms):
    """The dimension of a tensor seen as its atoms that a placement shards."""
    return sum(len(dim) for dim in atoms[: shard.dim]) + shard.atom


def _with_dims(tile, atoms):
    shape, rest = [], list(tile.shape)
    for dim in atoms:
        shape.append(torch.Size(rest[: len(dim)]).numel())
        rest = rest[len(dim) :]
    return tile.reshape(shape)


def _with_atoms(tile, atoms, coordinate, layout):
    """A rank's tile with one dimension per atom."""
    sizes = [size for dim in atoms for size in dim]
    for placement, ways, index in zip(
        layout.placements, layout.mesh.shape, coordinate, strict=True
    ):
        if isinstance(placement, Shard):
            at = _flat(placement, atoms)
            sizes[at] = len(cut(torch.arange(sizes[at]), placement, ways, 0)[index])
    return tile.reshape(sizes)


def _ranks(tiles, layout):
    """Every rank's coordinate with its tile, the last axis fastest."""
    coordinates = [()]
    for ways in layout.mesh.shape:
        coordinates = [(*c, i) for c in coordinates for i in range(ways)]
    return zip(coordinates, tiles, strict=True)
