"""Memory settled by lifetimes is what steps on two ranks take, under every kind of plan."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel import build
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness import models
from tests.harness.peak_memory import counted, predicted
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks

MESH = Mesh((("dp", 2),))
KINDS = ("data parallel", "ZeRO-2", "fully sharded", "tensor parallel")


class Deep(nn.Module):
    """Layers of several sizes, odd ones among them: several buckets, with padding."""

    def __init__(self):
        super().__init__()
        widths = (256, 600, 601, 599, 600, 10)
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        self.layers = nn.Sequential(*(m for one in layers for m in (one, nn.Tanh())))

    def forward(self, x):
        return self.layers(x).square().mean()


def deep():
    return Deep(), {"x": torch.randn(64, 256)}


SUBJECTS = {
    "transformer": lambda: models.gpt2(layers=2, hidden=192, heads=4, batch=8, length=64),
    "mlp": deep,
}


def plans_of(graph):
    """The fastest and well-known plans, also in three micro-batches."""
    machine = sw.Machine.preset("2xcpu")
    found = sw.search(graph, machine, meshes=[MESH])
    named = {plan.name: plan for plan in found.baselines}
    plans = {"chosen": found.plans[0]}
    plans |= {kind: named[kind] for kind in KINDS}
    pieces = sw.search(graph, machine, meshes=[MESH], micro_batches=(3,))
    named = {plan.name: plan for plan in pieces.baselines}
    plans |= {f"{kind} in micro-batches": named[kind] for kind in KINDS}
    return plans


def test_predicted_memory_is_what_two_ranks_take():
    plans, expected = {}, {}
    for name, make in SUBJECTS.items():
        model, batch = make()
        graph = capture_with_rules(model, (), batch).graph
        analysis = analyze(graph)
        for kind, plan in plans_of(graph).items():
            plans[name, kind] = plan
            decisions = read_plan(plan, graph, analysis)
            both = [predicted(graph, analysis, decisions, rank) for rank in range(2)]
            expected[name, kind] = max(both, key=lambda memory: memory.peak)
    ranks = run_ranks(2, _counted, plans)
    wrong = []
    for row, memory in expected.items():
        measured = max(found[row] for found in ranks)
        off = memory.peak / measured - 1
        print(row, f"{off:+.2%}", measured, memory.at, memory.peak)
        if abs(off) > 0.02:
            wrong.append((row, off))
    assert not wrong


def _counted(plans):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    subjects = {}
    for name, make in SUBJECTS.items():
        torch.manual_seed(0)
        model, batch = make()
        captured = capture_with_rules(model, (), batch)
        subjects[name] = model, batch, captured, analyze(captured.graph)
    found = {}
    for (name, kind), plan in plans.items():
        model, batch, captured, analysis = subjects[name]
        module = build(
            captured,
            analysis,
            read_plan(plan, captured.graph, analysis),
            ModuleOptions.of(model, torch.device("cpu")),
            mesh,
        )
        found[name, kind] = counted(module, batch, steps=3)
    return found
