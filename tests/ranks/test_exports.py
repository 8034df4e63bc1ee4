"""Plans exported for `parallelize_module`, applied by torch: same loss and gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import shardwright as sw
from shardwright.report.export import parallelize_module as export
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_norm = nn.LayerNorm(width // heads)  # of every head, as Qwen3 has it
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, 4)) for f in (self.q, self.k, self.v))
        heads = (x.transpose(1, 2) for x in (self.q_norm(q), k, v))
        a = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width=16, vocabulary=24, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def example():
    torch.manual_seed(0)
    batch = {name: torch.randint(24, (4, 8)) for name in ("ids", "labels")}
    return Model().double(), batch


@pytest.fixture(scope="module")
def baselines():
    model, batch = example()
    graph = sw.capture(model, (), batch)
    found = sw.search(graph, sw.Machine.preset("2xcpu"), optimizer="sgd").baselines
    return {plan.name: plan for plan in found}


@pytest.fixture(scope="module")
def exported(baselines):
    names = ("tensor parallel", "sequence and tensor parallel")
    return {name: export(baselines[name]) for name in names}


def test_the_exported_plans_give_the_loss_and_gradients_of_one_device(exported):
    run_ranks(2, _apply, list(exported.values()))


def test_tensor_parallelism_is_megatrons(exported):
    scope = _run(exported["tensor parallel"])
    kinds = {name: type(style).__name__ for name, style in scope["parallelize_plan"].items()}
    column, row = "ColwiseParallel", "RowwiseParallel"
    assert kinds == dict.fromkeys(
        [f"blocks.*.{name}" for name in ("q", "k", "v", "up")], column
    ) | {
        "blocks.*.o": row,
        "blocks.*.down": row,
        "embed": row,  # its vocabulary
        "head": column,
        "blocks.*.q_norm": "SequenceParallel",
    }
    assert scope["mesh"] == {"dp": 2}
    assert scope["data_axes"] == {}


def test_norms_and_residuals_are_split_by_sequence(exported):
    text = exported["sequence and tensor parallel"]
    assert '"blocks.*.norm1": SequenceParallel(sequence_dim=1, ' in text
    assert '"blocks.*.q_norm": SequenceParallel(sequence_dim=2, ' in text
    assert '"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())' in text
    assert "Note: the model itself is computed whole; the plan splits its classes." in text


def _run(text):
    scope = {}
    exec(text, scope)
    return scope


def _apply(texts):
    model, batch = example()
    alone = copy.deepcopy(model)
    loss = alone(**batch)
    loss.backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for text in texts:
        scope = _run(text)
        ours = parallelize_module(
            copy.deepcopy(model), mesh[scope["tensor_axis"]], scope["parallelize_plan"]
        )
        assert any(isinstance(p, DTensor) for p in ours.parameters())
        here = ours(**batch)
        torch.testing.assert_close(here, loss, rtol=1e-12, atol=1e-12)
        here.backward()
        for name, p in ours.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12, msg=name)
