"""Synchronous pipelines: stages on ranks give what one device gives, under every schedule.

Loss, every gradient and every updated buffer in float64. Within a stage every operator draws one
of its tilings and every parameter one of its layouts, so stages hand on tiles of any kind.
"""

import copy
import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.capture.capture import capture_call
from shardwright.ir.graph import LeafKind
from shardwright.ir.habits import Habits
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline, PipelineError, stage_mesh
from shardwright.ir.plan import Plan, PlanError
from shardwright.ir.widen import widen
from shardwright.lower.balance import balanced_cuts, operator_work
from shardwright.lower.decisions import Decisions, everything_whole
from shardwright.rules.analysis import analyze
from shardwright.rules.placing import tilings
from shardwright.runtime.async_pipeline import AsyncPipeline
from shardwright.runtime.async_sim import AsyncSimulation
from shardwright.runtime.parallel import build
from shardwright.runtime.stage import capture_stages
from shardwright.search.micro import MicroBook
from tests import models
from tests.ranks.harness import run_ranks, whole
from tests.ranks.test_random_tilings import error, some_pieces, stored_as

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-9
CPU = torch.device("cpu")
# On how many ranks: model, mesh, schedule, stages, micro-batches.
CASES = {
    2: [
        ("gpt2", "pp=2 dp=1", "GPipe", 2, 4),
        ("gpt2", "pp=2 dp=1", "1F1B", 2, 4),
        ("gpt2", "pp=2 dp=1", "Interleaved1F1B", 4, 4),
        ("gpt2", "pp=2 dp=1", "InterleavedZeroBubble", 4, 4),
        ("gpt2", "pp=2 dp=1", "InterleavedZeroBubble", 2, 4),
        ("gpt2", "pp=2 dp=1", "ZBVZeroBubble", 4, 4),
        ("t5", "pp=2 dp=1", "1F1B", 2, 2),
        ("t5", "pp=2 dp=1", "ZBVZeroBubble", 4, 3),
        ("unet", "pp=2 dp=1", "GPipe", 2, 1),
        ("resnet", "pp=2 dp=1", "GPipe", 2, 1),
        ("resnet in pieces", "pp=2 dp=1", "1F1B", 2, 3),
        ("resnet in pieces", "pp=2 dp=1", "Interleaved1F1B", 4, 3),
    ],
    4: [
        ("gpt2", "pp=4 dp=1", "1F1B", 4, 4),
        ("gpt2", "pp=2 dp=2", "GPipe", 2, 2),
        ("gpt2", "pp=2 tp=2", "ZBVZeroBubble", 4, 2),
        ("t5", "pp=4 dp=1", "GPipe", 4, 3),
        ("t5", "pp=2 tp=2", "1F1B", 2, 2),
        ("unet", "pp=4 dp=1", "GPipe", 4, 1),
        ("resnet", "pp=2 dp=2", "GPipe", 2, 1),
    ],
}


class ResNet(nn.Module):
    """Two residual blocks with batch norms, and the loss."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, images, classes):
        x = self.stem(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), classes)


def resnet():
    torch.manual_seed(0)
    batch = {"images": torch.randn(7, 3, 5, 5), "classes": torch.randint(5, (7,))}
    return ResNet(), batch


def t5():
    """Encoder and decoder, the encoder's output skipping to every layer of the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=23,
        d_model=12,
        d_kv=4,
        d_ff=14,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    ids = torch.randint(1, 23, (6, 5))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids.flip(0)[:, :4]}


MODELS = {
    "gpt2": lambda: models.gpt2(layers=2, batch=7),
    "t5": t5,
    "unet": models.unet,
    "resnet": resnet,
    "resnet in pieces": resnet,
}


class Subject:
    """A model's graph in float64, captured once, and what one device makes of it."""

    def __init__(self, name):
        model, self.batch = models.double(*MODELS[name]())
        self.local = name.endswith("in pieces")
        captured = capture_call(
            model, (), self.batch, Habits(batch_norm="local" if self.local else "exact")
        )
        self.graph = widen(captured.graph)
        self.captured = type(captured)(self.graph, captured.constants, captured.output_keys)
        self.analysis = analyze(self.graph)
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))

    def module(self, decisions, device_mesh):
        return build(
            self.captured,
            self.analysis,
            decisions,
            weights=self.weights,
            buffers=self.buffers,
            persistent=frozenset(),
            device_mesh=device_mesh,
            device=CPU,
            seed=3,
        )

    def serial(self, count):
        """The whole batch at once; with local batch norms its micro-batches, one by one."""
        decisions = everything_whole(self.graph)
        if self.local:
            decisions = Decisions(
                decisions.mesh, decisions.tilings, decisions.storage, micro_batches=count
            )
        module = self.module(decisions, None)
        losses = []
        for _ in range(2):  # the second step draws other numbers
            loss = module(**self.batch)
            loss.backward()
            losses.append(loss.detach())
        return losses, module

    def pipelined(self, mesh, schedule, stages, count, device_mesh):
        """Two steps of the pipeline, with any tilings."""
        inner, draw = stage_mesh(mesh), random.Random(f"{mesh} {schedule}")
        cuts = balanced_cuts(self.graph, stages, operator_work(self.graph, self.analysis))
        small = MicroBook(self.graph, self.analysis).analyzed(count)[1]
        chosen = {
            op.name: draw.choice([tiling for tiling, _ in tilings(small.rules[op.name], inner)])
            for op in self.graph.ops
        }
        storage = {
            leaf.name: draw.choice(stored_as(self.analysis.atoms[leaf.name], inner))
            for leaf in self.graph.leaves_of(LeafKind.PARAMETER)
        }
        decisions = Decisions(
            inner,
            chosen,
            storage,
            frozenset(key for key in storage if draw.random() < 0.5),
            some_pieces(self.graph, draw) if inner.size > 1 else {},
            count,
            Pipeline(tuple(self.graph.ops[i].name for i in cuts), schedule, mesh.shape[0]),
        )
        module = self.module(decisions, device_mesh)
        return [module.forward_backward(self.batch) for _ in range(2)], module


@pytest.fixture(scope="module")
def subjects():
    return {name: Subject(name) for name in MODELS}


def compare(subjects, cases):
    meshes = {}
    for name, text, schedule, stages, count in cases:
        mesh = Mesh.parse(text)
        if text not in meshes:
            meshes[text] = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        subject = subjects[name]
        losses, serial = subject.serial(count)
        found, pipeline = subject.pipelined(mesh, schedule, stages, count, meshes[text])
        errors = {
            f"loss {i}": error(a, b) for i, (a, b) in enumerate(zip(losses, found, strict=True))
        }
        for key, parameter in pipeline.named_parameters():
            gradient = serial.get_parameter(key).grad
            errors[f"gradient of {key}"] = error(gradient, whole(parameter.grad))
        for key, buffer in pipeline.named_buffers():
            if not key.startswith("_sw"):
                errors[f"buffer {key}"] = error(serial.get_buffer(key), buffer)
        worst = max(errors, key=errors.get)
        case = f"{name}, {text}, {schedule}, {stages} stages, {count} micro-batches"
        assert errors[worst] <= TOLERANCE, f"{case}: {worst} is {errors[worst]:.1e} off"
        assert len(errors) > 3, case


@pytest.mark.hf
@pytest.mark.parametrize("world", CASES)
def test_pipelines_equal_one_device(subjects, world):
    run_ranks(world, compare, subjects, CASES[world])


def planned(model, batch, stages, **options):
    """The smallest pipeline plan for two or four devices on which nothing but stages pays."""
    graph = sw.capture(model, (), batch)
    machine = sw.Machine.preset(f"{stages}xcpu")
    return graph, sw.search(graph, machine, "sgd_momentum", stages=(stages,), **options)


def trains(model, batch, plan):
    """A searched plan trains like one device, and says why it has no loss with a gradient."""
    serial = copy.deepcopy(model)
    pipeline = sw.parallelize(model, plan, seed=5)
    steps = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        alone.zero_grad()
        loss = serial(**batch)["loss"]
        loss.backward()
        alone.step()
        assert error(loss.detach(), pipeline.train_step(steps, batch)) < 1e-5  # a loss in float32
    held = dict(pipeline.named_parameters(remove_duplicate=False))
    assert 0 < len(held) < len(dict(serial.named_parameters(remove_duplicate=False)))
    for key, parameter in held.items():
        assert error(serial.get_parameter(key).detach(), whole(parameter)) < 1e-5, key
    with torch.no_grad():
        again = pipeline(**batch)
        assert error(serial(**batch)["loss"], again) < 1e-5
    with pytest.raises(PipelineError, match=r"use train_step\(optimizer, batch\)"):
        pipeline(**batch)


@pytest.mark.hf
def test_a_searched_pipeline_trains_and_is_verified():
    model, batch = models.double(*models.gpt2(layers=2, dropout=0.0, batch=4))
    _, frontier = planned(model, batch, 2)
    plan = frontier.smallest()
    assert (plan.stages, plan.schedule, len(plan.cuts)) == (2, "1F1B", 1)
    assert Plan.from_json(plan.to_json()) == plan
    run_ranks(2, trains, model, batch, plan)
    report = sw.verify(model, plan, (), batch)
    assert report.ok, report
    assert report.devices == 2


def asynchronous(model, batch, plan):
    """A plan that says so gives the pipeline that is simulated, bit for bit."""
    how = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    pipeline = sw.parallelize(model, plan)
    assert isinstance(pipeline, AsyncPipeline)
    steps = how(pipeline.parameters())
    losses = [pipeline.train_step(steps, batch) for _ in range(4)]
    losses = [loss for loss in losses if not loss.isnan()] + pipeline.drain(steps)
    number = {op.name: i for i, op in enumerate(capture_call(model, (), batch).graph.ops)}
    cuts = [number[name] for name in plan.cuts]
    stages = capture_stages(model, (), batch, stages=2, cuts=cuts)
    simulation = AsyncSimulation(stages, model, "spectrain", how)
    assert losses == [simulation.train_step(batch) for _ in range(4)]


def test_an_asynchronous_plan_runs_and_is_not_verified():
    model, batch = models.double(*models.cnn())
    graph = sw.capture(model, (), batch)
    frontier = sw.search(
        graph, sw.Machine.preset("2xcpu"), "sgd_momentum", stages=(2,), allow_async=True
    )
    plan = next(plan for plan in frontier if plan.schedule.startswith("async"))
    run_ranks(2, asynchronous, model, batch, plan)
    with pytest.raises(PlanError, match="does not compute what one device computes"):
        sw.verify(model, plan, (), batch)
