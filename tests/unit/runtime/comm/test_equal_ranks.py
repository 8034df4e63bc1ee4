"""Comparison of what ranks are given, along the axes of their mesh alone."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.runtime.comm.equal_ranks import all_equal, require_own_parts, require_same_batch
from shardwright.tracing.arguments import BatchError
from tests.harness.ranks import run_ranks

RANKS = torch.arange(4).view(2, 2)


def _told(value, mesh, require=require_same_batch):
    """What this rank is told of a batch of `value`."""
    try:
        require({"x": torch.tensor(value, dtype=torch.float32)}, mesh.get_all_groups())
    except BatchError as e:
        return str(e)
    return ""


def compared():
    """Whether ranks of a mesh of two axes, and of two meshes in one world, are told."""
    rank = dist.get_rank()
    both = DeviceMesh("cpu", RANKS, mesh_dim_names=("a", "b"))
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("a gather")):
        told = [_told(7, both)]  # what is equal takes 16 bytes
    told += [*(_told(rank == other, both) for other in range(4))]
    assert all_equal(("any", 1.5), both.get_all_groups())
    for other in range(4):
        assert not all_equal(rank == other, both.get_all_groups())
        assert not all_equal({"a": rank == other}, (dist.group.WORLD,))
    of_parts = [_told(part, both, require_own_parts) for part in ([1, 2], [1, 1], [1, rank])]
    # The pairs compare a different number of batches, which are not those of the other pair.
    pair = both["b"]
    for _ in range(1 + rank // 2):
        told.append(_told(rank // 2, pair))
    seen = [None, None]
    dist.all_gather_object(seen, rank, group=pair.get_group())
    return told, of_parts, seen


@pytest.mark.ranks
def test_the_ranks_of_a_mesh_compare_their_batches():
    """All ranks of a world were asked, so that two meshes in it read each other's messages."""
    for rank, (told, of_parts, seen) in enumerate(run_ranks(4, compared)):
        equal, *different = told[:5]
        assert equal == ""
        assert all(text.startswith("x differs between ranks") for text in different)
        assert of_parts[0].startswith("x of shape [2] has the shape of a rank's part, and is the s")
        assert of_parts[1:] == ["", ""]
        assert told[5:] == [""] * (1 + rank // 2)
        assert seen == [rank // 2 * 2, rank // 2 * 2 + 1]
