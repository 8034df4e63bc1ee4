"""Models built by shards: under every plan the values of one device, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks
PLANS = {
    2: ["tp=2", "pp=2 mb=2"],
    4: ["dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2"],
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


class TiedModel(nn.Module):
    """Ties, values that the constructor assigns, and a buffer that is no part of state dicts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32, padding_idx=1)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(32))
        self.scale.data.normal_()
        self.register_buffer("mask", torch.rand(16, 1) > 0.2, persistent=False)
        self.shift = torch.randn(32).cumsum(0)

    def forward(self, x, y):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden * self.scale * self.mask + self.shift)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def make():
    return TiedModel().double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(64, (8, 16), generator=generator) for _ in range(2))


def plan_of(strategy):
    graph = sw.capture(make(), batch())
    world = dist.get_world_size() if dist.is_initialized() else 1
    return sw.price(graph, f"{world}xH100", strategy)


def trained(given, plan):
    """The local tensors, numbers drawn afterwards, and the losses of two steps."""
    torch.manual_seed(5)
    module = sw.parallelize(given(), plan)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    tiles = {n: t.to_local() if hasattr(t, "to_local") else t.clone() for n, t in named}
    tiles = {n: t.detach().clone() for n, t in tiles.items()}
    drawn = torch.rand(3)
    optimizer = torch.optim.AdamW(module.parameters())
    losses = [module.train_step(optimizer, batch()).item() for _ in range(2)]
    return tiles, drawn, losses


def compared(strategies):
    for strategy in strategies:
        plan = plan_of(strategy)
        expected, drawn, losses = trained(make, plan)
        tiles, drawn_after, found = trained(lambda: make, plan)
        assert tiles.keys() == expected.keys()
        assert [n for n in tiles if not torch.equal(tiles[n], expected[n])] == [], strategy
        assert torch.equal(drawn_after, drawn)
        assert found == losses, strategy
    if dist.is_initialized():
        refused(plan)


def refused(plan):
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="rank 1 would give the model other values than rank 0"):
        sw.parallelize(make, plan)


@pytest.mark.parametrize("world", PLANS)
def test_a_function_gives_the_tiles_of_the_module_that_it_builds(world):
    run_ranks(world, compared, PLANS[world])


def test_one_device_builds_the_module_itself():
    compared(["dp_shard=1"])
