"""MLPs in chunks on ranks: exact in float64, and their memory as predicted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.rules.operators.mlp_chunks import with_mlp_chunks
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel import build
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness.peak_memory import counted, predicted
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks

WORDS, WIDTH, INNER, TOLERANCE = 20, 16, 256, 1e-10


class Layer(nn.Module):
    """A norm, and an MLP of one of four kinds with a residual sum."""

    def __init__(self, kind):
        super().__init__()
        self.kind, biased = kind, kind in ("plain", "dropped")
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER, bias=False) if kind == "gated" else None
        self.up = nn.Linear(WIDTH, INNER * (1 + (kind == "together")), bias=biased)
        self.down = nn.Linear(INNER, WIDTH, bias=biased)

    def forward(self, x):
        y = self.norm(x)
        if self.kind == "plain":
            return x + self.down(F.gelu(self.up(y)))
        if self.kind == "dropped":
            return x + self.down(F.dropout(F.gelu(self.up(y)), 0.3, self.training))
        gate, up = self.up(y).chunk(2, -1) if self.gate is None else (self.gate(y), self.up(y))
        return x + self.down(F.silu(gate) * up)


class Words(nn.Module):
    """A model whose MLPs take most of its memory."""

    def __init__(self, kinds):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(map(Layer, kinds))

    def forward(self, words, labels):
        x = self.table(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def subject(*kinds):
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (8, 64))
    model = Words(kinds or ("gated", "together", "gated", "plain"))
    return model.double(), {"words": ids, "labels": ids.roll(1, 1)}


DROPPED = ("dropped",) * 4


STRATEGIES = (
    "dp_replicate=2",
    "dp_shard=2 mb=2",
    "tp=2",
    "dp_shard=2 ac=full",
    "tp=2 ac=full",
    "dp_shard=2 compile=regional",
)
COUNTS = (1, 8)


def priced(graph, strategies):
    """Plans and decisions by strategy and number of chunks, and their predicted peaks."""
    plans, expected = {}, {}
    for text in strategies:
        for count in COUNTS:
            chunked = with_mlp_chunks(graph, count)
            analysis = analyze(chunked)
            name = text + (f" mlp=chunked({count})" if count > 1 else "")
            plan = sw.price(graph, "2xcpu", name)
            assert plan.name == name and plan.numerics.mlp_chunks == count
            decisions = read_plan(plan, chunked, analysis)
            both = [predicted(chunked, analysis, decisions, rank).peak for rank in range(2)]
            plans[text, count], expected[text, count] = (plan, decisions), max(both)
    return plans, expected


def require_memory(ranks, strategies, expected):
    """Counted peaks are the predicted ones, and much smaller with chunks."""
    for case, peak in expected.items():
        if "regional" in case[0]:
            continue  # its fused kernels are not those of eager torch
        measured = max(found[case] for found in ranks)
        assert abs(peak / measured - 1) <= 0.02, f"{case}: {peak} predicted, {measured} counted"
    for text in strategies:
        peaks = [max(found[text, count] for found in ranks) for count in COUNTS]
        assert "regional" in text or peaks[1] < 0.6 * peaks[0], (text, peaks)


def test_gradients_are_exact_and_memory_is_as_predicted_and_falls_with_chunks():
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    model(**batch).backward()
    serial = {name: p.grad for name, p in model.named_parameters()}
    plans, expected = priced(graph, STRATEGIES)
    require_memory(run_ranks(2, _counted, plans, serial), STRATEGIES, expected)


def test_dropout_inside_draws_the_numbers_of_the_whole():
    model, batch = subject(*DROPPED)
    strategies = ("tp=2 ac=full", "dp_shard=2 mb=2", "dp_shard=2 compile=regional")
    plans, expected = priced(sw.capture(model, (), batch), strategies)
    require_memory(run_ranks(2, _counted, plans, None, DROPPED), strategies, expected)


def _counted(plans, serial, kinds=()):
    """Counted peaks; gradients are compared with `serial`, or with those of the first plan."""
    model, batch = subject(*kinds)
    found = {}
    for case, (plan, decisions) in plans.items():
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
        captured = capture_with_rules(model, (), batch, plan.numerics)
        options = ModuleOptions.of(model, torch.device("cpu"))
        module = build(captured, analyze(captured.graph), decisions, options, mesh)
        if plan.compiled and case[1] > 1:
            module.compile_programs()
        module(**batch).backward()
        mine = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
        serial = serial or mine
        for name, gradient in mine.items():
            off = (gradient - serial[name]).abs().max()
            assert off <= TOLERANCE, f"{case}: the gradient of {name} is {off:.1e} off"
        module.zero_grad(set_to_none=True)
        found[case] = counted(module, batch, steps=3) if not plan.compiled else 0
    return found


def test_a_plan_in_chunks_is_the_module(tmp_path):
    for strategy, kinds in (("cp=2", ()), ("pp=2 mb=4 ac=full", ()), ("cp=2 mb=2", DROPPED)):
        model, batch = subject(*kinds)
        graph = sw.capture(model, (), batch)
        sw.price(graph, "2xcpu", f"{strategy} mlp=chunked(3)").save(tmp_path / "plan.json")
        plan = sw.Plan.load(tmp_path / "plan.json")
        said = " ".join(plan.explain().split())
        assert plan.numerics.mlp_chunks == 3 and "MLP in 3 chunks" in said
        report = sw.verify(model, plan, (), batch)
        assert report.ok, report
