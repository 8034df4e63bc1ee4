"""A gradient takes its placement from its parameter, without what `from_local` computes again."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.runtime.parameters.dtensor_spec import DTensorSpec, local


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(1))])
def test_a_tile_is_placed_as_its_parameter_is(mesh, placements, differentiated):
    tile = torch.arange(6.0).view(2, 3)
    parameter = torch.nn.Parameter(DTensor.from_local(tile, mesh, placements, run_check=False))
    placed = DTensorSpec(parameter)
    assert placed.suits(parameter) and placed.local_shape == tile.shape
    found = []

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, leaf):
            return local(leaf).detach() * 2

        @staticmethod
        def backward(ctx, gradient):
            found.append(placed.whole(2 * gradient))
            return found[-1]

    Times.apply(parameter).square().sum().backward(create_graph=differentiated)
    expected = DTensor.from_local(8 * tile, mesh, placements, run_check=False)
    for one in (found[0], parameter.grad):
        assert isinstance(one, DTensor)
        assert (one.placements, one.device_mesh) == (expected.placements, mesh)
        assert (one.shape, one.stride(), one.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        assert torch.equal(one.to_local(), expected.to_local())
        assert torch.equal((one + expected).to_local(), 16 * tile), "operators take it"
    assert found[0].requires_grad == differentiated
    assert not placed.suits(torch.nn.Parameter(expected.double()))
