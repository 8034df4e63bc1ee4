"""Models built by shards: under every plan the values of one device, bit for bit."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import shardwright as sw
from tests.harness.peak_memory import resident_growth
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
        self.register_buffer("mask", torch.arange(16)[:, None] > 2, persistent=False)
        self.shift = torch.arange(32.0).sin()

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


def local(module):
    """This rank's part of every parameter and buffer."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    named = [(n, t.detach()) for n, t in named if not n.startswith("_sw")]
    return {n: (t.to_local() if hasattr(t, "to_local") else t).clone() for n, t in named}


def trained(given, plan):
    """The local tensors, numbers drawn afterwards, and the losses of two steps."""
    torch.manual_seed(5)
    module = sw.parallelize(given(), plan)
    tiles, drawn = local(module), torch.rand(3)
    optimizer = torch.optim.AdamW(module.parameters())
    losses = [module.train_step(optimizer, batch()).item() for _ in range(2)]
    return tiles, drawn, losses


def compared(strategies, folder):
    for number, strategy in enumerate(strategies):
        plan = plan_of(strategy)
        expected, drawn, losses = trained(make, plan)
        tiles, drawn_after, found = trained(lambda: make, plan)
        assert tiles.keys() == expected.keys()
        assert [n for n in tiles if not torch.equal(tiles[n], expected[n])] == [], strategy
        assert torch.equal(drawn_after, drawn)
        assert found == losses, strategy
        for file in ("weights.pt", "dcp", "saved"):
            torch.manual_seed(6)
            module = sw.parallelize(make, plan, weights=folder / file)
            assert [n for n, t in local(module).items() if not torch.equal(t, expected[n])] == []
        module.save_pretrained(folder / f"saved{number}", max_shard_size=20000)
    if dist.is_initialized():
        refused(plan)
    if dist.is_initialized() and dist.get_world_size() == 2:
        little_memory(folder)


def refused(plan):
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="rank 1 would give the model other values than rank 0"):
        sw.parallelize(make, plan)


class Wide(nn.Module):
    """Six layers of 67 MB, which a rank has 201 MB of."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def little_memory(folder):
    """Ranks that build, save and load have little more than their share at any time."""
    with torch.device("meta"):
        model = Wide()
    size = sum(p.nbytes for p in model.parameters())
    plan = sw.price(sw.capture(model, (torch.zeros(8, 4096),)), "2xH100", "dp_shard=2")
    besides = 2**26 + 64 * 10**6  # a bucket, and what a process needs for anything
    assert size // 2 + besides < size, "a rank with the whole model breaks the bound"
    torch.manual_seed(0)
    module, grown = resident_growth(lambda: sw.parallelize(Wide, plan))
    share = sum(p.to_local().nbytes for p in module.parameters())
    assert share * 2 == size
    assert grown <= share + besides, f"{grown / 1e6:.0f} MB to build {share / 1e6:.0f} MB"
    expected = [p.to_local().double().sum() for p in module.parameters()]
    _, grown = resident_growth(lambda: module.save_pretrained(folder / "wide"))
    assert grown <= besides, f"{grown / 1e6:.0f} MB to save"
    module = None
    loaded, grown = resident_growth(lambda: sw.parallelize(model, plan, weights=folder / "wide"))
    assert grown <= share + besides, f"{grown / 1e6:.0f} MB to load {share / 1e6:.0f} MB"
    assert [p.to_local().double().sum() for p in loaded.parameters()] == expected


def check(world, strategies, folder):
    """Compare on `world` ranks, and what they save with what one device has."""
    torch.manual_seed(5)
    state = make().state_dict()
    dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
    del state["head.weight"]
    torch.save(state, folder / "weights.pt")
    (folder / "saved").mkdir()
    save_file(state, folder / "saved" / "model.safetensors")
    if world == 1:
        compared(strategies, folder)
    else:
        run_ranks(world, compared, strategies, folder)
    for number in range(len(strategies)):
        saved = folder / f"saved{number}"
        index = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
        assert len({*index.values()}) == 5
        files = {name: load_file(saved / name) for name in {*index.values()}}
        assert {*index} == {key for file in files.values() for key in file} == {*state}
        assert all(torch.equal(files[index[key]][key], state[key]) for key in state)
        names = {path.name for path in saved.iterdir()}
        assert names == {*files, "model.safetensors.index.json"}


@pytest.mark.parametrize("world", PLANS)
def test_tiles_are_those_of_one_device_from_a_function_and_from_files(world, tmp_path):
    check(world, PLANS[world], tmp_path)


def test_one_device_builds_the_module_itself(tmp_path):
    check(1, ["dp_shard=1"], tmp_path)
