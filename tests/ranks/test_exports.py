"""Exported plans, applied by the tools they are for: loss and gradients of one device."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import shardwright as sw
from shardwright.report.export import hf_tp_plan, split_spec
from shardwright.report.export import parallelize_module as export
from shardwright.report.styles import NotExpressibleError
from tests.harness.ranks import run_ranks

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
        return loss_of(self.scores(ids), labels)

    def scores(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Scores(Model):
    """The same, its loss outside: torch's pipelines compute one from what a model returns."""

    def forward(self, ids):
        return self.scores(ids)


def loss_of(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


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
def staged():
    """The first plan of two stages whose cuts are beginnings of modules, exported."""
    model, batch = example()
    graph = sw.capture(model, (), batch)
    machine = sw.Machine.preset("2xcpu")
    found = sw.search(graph, machine, optimizer="sgd", stages=(2,), micro_batches=(2,))
    for plan in (*found, *found.baselines):
        if plan.stages == 2:
            try:
                return split_spec(plan)
            except NotExpressibleError:
                continue
    raise AssertionError("no plan begins a stage with a module")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder with a Qwen3, whose heads are normalised, and its tensor parallel plan."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).double()
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    ids = torch.zeros(4, 8, dtype=torch.long)
    graph = sw.capture(model, kwargs={"input_ids": ids, "labels": ids})
    baselines = sw.search(graph, sw.Machine.preset("2xcpu")).baselines
    ours = json.loads(hf_tp_plan(next(b for b in baselines if b.name == "tensor parallel")))
    vocabulary = {"embed_tokens": "embedding_rowwise"}  # which Hugging Face leaves whole
    assert ours["base_model_tp_plan"] == config.base_model_tp_plan | vocabulary
    assert ours["_tp_plan"] == type(model)._tp_plan
    named = {f"model.{name}": style for name, style in ours["base_model_tp_plan"].items()}
    return str(folder), named | ours["_tp_plan"]


@pytest.fixture(scope="module")
def exported(baselines):
    names = ("tensor parallel", "sequence and tensor parallel")
    return {name: export(baselines[name]) for name in names}


@pytest.mark.hf
def test_the_exported_plans_give_the_loss_and_gradients_of_one_device(exported, staged, qwen):
    run_ranks(2, _apply, list(exported.values()), staged, qwen)


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
    assert scope["mesh"] == {"tp": 2}
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


def _apply(texts, staged, qwen):
    _in_modules(texts)
    _in_stages(json.loads(staged))
    _in_hugging_face(*qwen)


def _in_stages(spec):
    """By torch's pipelining: the loss on the last rank, on each the gradients of its stage."""
    model, batch = example()
    plain = Scores().double()
    plain.load_state_dict(model.state_dict())
    loss = model(**batch)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    parts = spec["n_microbatches"]
    split = {
        name: SplitPoint[point.partition(".")[2]] for name, point in spec["split_spec"].items()
    }
    pipe = pipeline(plain, (batch["ids"].chunk(parts)[0],), split_spec=split)
    rank = dist.get_rank()
    stage = pipe.build_stage(rank, torch.device("cpu"))
    kind = get_schedule_class(spec["schedule"])
    stages = [stage] if issubclass(kind, PipelineScheduleMulti) else stage
    schedule = kind(stages, parts, loss_fn=loss_of)
    if rank == 0:
        schedule.step(batch["ids"])
    else:
        losses = []
        schedule.step(target=batch["labels"], losses=losses)
        assert len(losses) == parts > 1
        torch.testing.assert_close(sum(losses) / parts, loss, rtol=1e-12, atol=1e-12)
    mine = dict(stage.submod.named_parameters())
    assert 0 < len(mine) < len(expected)
    for name, p in mine.items():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-12, msg=name)


def _in_hugging_face(folder, plan):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.manual_seed(1)
    ids = torch.randint(64, (4, 8))
    whole, split = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
        for options in ({}, {"distributed_config": DistributedConfig(tp_plan=plan, tp_size=2)})
    )
    sharded = {name for name, p in split.named_parameters() if isinstance(p, DTensor)}
    assert "model.layers.1.mlp.down_proj.weight" in sharded
    losses = [model(input_ids=ids, labels=ids).loss for model in (whole, split)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for loss in losses:
        loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in split.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def _in_modules(texts):
    model, batch = example()
    alone = copy.deepcopy(model)
    loss = alone(**batch)
    loss.backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
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
