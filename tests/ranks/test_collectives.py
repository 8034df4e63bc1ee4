"""Steps on plain tiles give what cutting, joining and adding up whole tensors gives."""

from itertools import permutations, product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import Move
from shardwright.runtime.comm.collectives import collected
from tests.harness.ranks import run_ranks

RANKS = 3
DTYPES = torch.float64, torch.complex128, torch.int16  # gloo knows no integers of 16 bits
SHAPES = (6, 3), (5, 4), (1, 7), (2, 4, 5)  # over three ranks: even, shorter last tiles, empty ones


@pytest.mark.ranks
def test_every_step_of_uneven_tiles_is_exact():
    run_ranks(RANKS, _collects)


def _collects():
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    rank, seed = mesh.get_local_rank(), torch.Generator().manual_seed(3)
    for shape, dtype in product(SHAPES, DTYPES):
        parts = [torch.randint(-99, 99, shape, generator=seed).to(dtype) for _ in range(RANKS)]
        whole, mine = sum(parts), parts[rank]
        for kind, src, dst in _steps(len(shape)):
            given = mine if src < 0 else _tile(whole, src, rank)
            # As a view with gaps, which collectives themselves do not take.
            tile = torch.stack((given, -given), -1)[..., 0]
            expected = whole if dst < 0 else _tile(whole, dst, rank)
            start = 0 if dst < 0 else min(rank * -(-shape[dst] // RANKS), shape[dst])
            length = 0 if dst < 0 else expected.shape[dst]
            move = Move("dp", kind, shape, src, dst, start, length, True)
            found = collected(tile, move, mesh)
            assert torch.equal(found, expected), (kind, shape, dtype, src, dst)
            assert torch.equal(tile, given), f"{kind} writes into what it is given"


def _steps(dims):
    yield Collective.ALL_REDUCE, -1, -1
    for dim in range(dims):
        yield Collective.ALL_GATHER, dim, -1
        yield Collective.REDUCE_SCATTER, -1, dim
    for src, dst in permutations(range(dims), 2):
        yield Collective.ALL_TO_ALL, src, dst


def _tile(whole, dim, rank):
    """As `torch.chunk` cuts it, which gives fewer where there is nothing left."""
    tiles = whole.chunk(RANKS, dim)
    return tiles[rank] if rank < len(tiles) else whole.narrow(dim, 0, 0)
