"""A loss in chunks on ranks: exact in float64, and its memory as predicted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.rules.operators.loss_chunks import with_loss_chunks
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel import build
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness import models
from tests.harness.peak_memory import counted, predicted
from tests.harness.ranks import run_ranks
from tests.ranks.test_random_tilings import TOLERANCE, Widened, error
from tests.ranks.test_wide import along, stepped, stored

pytestmark = pytest.mark.ranks

WORDS, CHUNKS = 53, 3  # a prime number, so parts are uneven


class Smoothed(nn.Module):
    """A tied table with a bias, label smoothing, class weights, labels that do not count."""

    def __init__(self):
        super().__init__()
        self.table, self.bias = nn.Embedding(WORDS, 6), nn.Parameter(torch.linspace(-1, 1, WORDS))
        self.register_buffer("weight", torch.linspace(0.5, 2.0, WORDS))

    def forward(self, words, labels):
        logits = F.linear(self.table(words).tanh(), self.table.weight, self.bias)
        return F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            self.weight,
            ignore_index=3,
            label_smoothing=0.1,
        )


def smoothed():
    words = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(2))
    labels = words.roll(1, 1)
    labels[:, 0] = 3
    return Smoothed(), {"words": words, "labels": labels}


CASES = {  # a model, a value and the dimension of it that is split
    "classes": (smoothed, "table.weight", 0),
    "samples": (smoothed, "kwargs.words", 0),
    "sequence": (smoothed, "kwargs.words", 1),
    "classes of gpt2": (models.gpt2, "transformer.wte.weight", 0),
}


class InChunks(Widened):
    """A model's graph in float64, with its loss in chunks."""

    def __init__(self, model, batch):
        super().__init__(model, batch)
        self.graph = with_loss_chunks(self.graph, CHUNKS)
        self.captured = type(self.captured)(
            self.graph, self.captured.constants, self.captured.output_keys
        )
        self.analysis = analyze(self.graph)


@pytest.mark.hf
def test_a_loss_in_chunks_equals_the_whole_loss():
    subjects = {}
    for name, (make, *_) in CASES.items():
        torch.manual_seed(1)
        model, batch = models.double(*make())
        whole = Widened(model, batch)
        subjects[name] = InChunks(model, batch), stepped(whole, whole.one_device())
    run_ranks(2, _compare, subjects)


def _compare(subjects):
    mesh = Mesh.parse("a=2")
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    for name, (one, serial) in subjects.items():
        _, value, dim = CASES[name]
        atom = one.analysis.dims[value][dim][-1]
        chosen, split = along(one, mesh, atom)
        assert "linear_cross_entropy" in split
        storage = {
            leaf.name: stored(one, leaf.name, mesh, atom)
            for leaf in one.graph.leaves_of(LeafKind.PARAMETER)
        }
        if name == "samples":  # as in FSDP
            atom = one.analysis.dims["table.weight"][0][-1]
            storage = {leaf: stored(one, leaf, mesh, atom) for leaf in storage}
        found = stepped(one, one.module(mesh, chosen, storage, device_mesh, regathered=storage))
        if name == "classes":
            again = one.module(mesh, chosen, storage, device_mesh)
            found |= one.run(torch.compile(again, backend="aot_eager"))
        for key, value in found.items():
            off = error(serial[key.replace("_orig_mod.", "")], value)
            assert off <= TOLERANCE, f"{name}: {key} is {off:.1e} off"


class Words(nn.Module):
    """A model whose logits are most of its memory."""

    def __init__(self, count):
        super().__init__()
        self.table, self.layer = nn.Embedding(count, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, count, bias=False)

    def forward(self, words, labels):
        logits = self.head(self.layer(self.table(words)).tanh())
        return F.cross_entropy(self.wide(logits).flatten(0, 1), labels.flatten())

    def wide(self, logits):
        return logits.float()


class HalfWords(Words):
    """Its loss is on logits in half precision, which a split loss casts by itself."""

    def wide(self, logits):
        return logits


STRATEGIES = ("dp_replicate=2", "dp_shard=2 mb=2", "tp=2", "pp=2 mb=2")
COUNTS = (1, 8)


def words(count=4001, length=64):
    torch.manual_seed(0)
    ids = torch.randint(count, (16, length))
    return Words(count), {"words": ids, "labels": ids}


def half_words():
    model, batch = words(4000)
    half = HalfWords(4000).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    return half, batch


def test_predicted_memory_is_what_ranks_take_and_falls_with_chunks():
    model, batch = words()
    graph = sw.capture(model, (), batch)
    plans, expected = {}, {}
    for text in STRATEGIES:
        for count in COUNTS:
            chunked = with_loss_chunks(graph, count)
            analysis = analyze(chunked)
            loss = f" loss=chunked({count})" if count > 1 else ""
            plan = sw.price(graph, "2xcpu", text + loss)
            assert plan.name == text + loss and plan.numerics.loss_chunks == count
            decisions = read_plan(plan, chunked, analysis)
            both = [predicted(chunked, analysis, decisions, rank).peak for rank in range(2)]
            plans[text, count], expected[text, count] = (plan, decisions), max(both)
    ranks = run_ranks(2, counted_peaks, words, plans)
    for case, peak in expected.items():
        measured = max(found[case] for found in ranks)
        assert abs(peak / measured - 1) <= 0.02, f"{case}: {peak} predicted, {measured} counted"
    for text in STRATEGIES:
        peaks = [max(found[text, count] for found in ranks) for count in COUNTS]
        assert peaks == sorted(peaks, reverse=True) and peaks[1] < 0.6 * peaks[0], (text, peaks)


def test_a_split_loss_in_half_precision_takes_what_is_predicted():
    model, batch = half_words()
    graph = sw.capture(model, (), batch)
    analysis = analyze(graph)
    pinned = ["mesh tp=2", "pin head=tp:classes"]
    plan = sw.search(graph, "2xcpu", constraints=pinned).fastest()
    assert plan.tilings["cross_entropy_loss"] != (None,)
    decisions = read_plan(plan, graph, analysis)
    peak = max(predicted(graph, analysis, decisions, rank).peak for rank in range(2))
    measured = max(
        found["half"]
        for found in run_ranks(2, counted_peaks, half_words, {"half": (plan, decisions)})
    )
    assert abs(peak / measured - 1) <= 0.02, f"{peak} predicted, {measured} counted"


def counted_peaks(make, plans):
    """The counted peak of a step of each plan of the model that `make` returns with a batch."""
    model, batch = make()
    found = {}
    for case, (plan, decisions) in plans.items():
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
        captured = capture_with_rules(model, (), batch, plan.numerics)
        options = ModuleOptions.of(model, torch.device("cpu"))
        module = build(captured, analyze(captured.graph), decisions, options, mesh)
        found[case] = counted(module, batch, steps=3)
    return found


def test_a_plan_in_chunks_is_the_module(tmp_path):
    model, batch = words(54, 3)
    graph = sw.capture(model, (), batch)
    for strategy in ("tp=2", "pp=2 mb=4"):
        sw.price(graph, "2xcpu", f"{strategy} loss=chunked(3)").save(tmp_path / "plan.json")
        report = sw.verify(model, sw.Plan.load(tmp_path / "plan.json"), (), batch)
        assert report.ok, report
