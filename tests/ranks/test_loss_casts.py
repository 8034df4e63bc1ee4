"""A loss that casts half-precision logits by itself: its memory, and the module's results."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.options.numerics import Numerics
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.rules.operators import half_logits
from tests.harness.peak_memory import predicted
from tests.harness.ranks import run_ranks, whole
from tests.ranks.test_loss_chunks import counted_peaks

pytestmark = pytest.mark.ranks

PART = 2**16  # elements of the logits that are cast at a time: several parts on each rank
STRATEGIES = ("dp_replicate=2", "dp_shard=2 mb=2", "pp=2 mb=2", "classes")
PINNED = ("mesh tp=2", "pin head=tp:classes")
FORMS = ("model", "fused")


class Words(nn.Module):
    """A language model of one layer with the loss of Hugging Face's models."""

    def __init__(self, count):
        super().__init__()
        self.table, self.layer = nn.Embedding(count, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, count, bias=False)

    def forward(self, words, labels):
        logits = self.head(self.layer(self.table(words)).tanh()).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def words(count, length):
    torch.manual_seed(0)
    ids = torch.randint(count, (16, length))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[3] = -100
    return Words(count).to(torch.bfloat16), {"words": ids, "labels": labels}


def _plan(graph, text):
    if text == "classes":
        return sw.search(graph, "2xcpu", constraints=PINNED).fastest()
    return sw.price(graph, "2xcpu", text)


def test_memory_is_what_is_predicted_and_has_no_copies_in_float32(monkeypatch):
    monkeypatch.setattr(half_logits, "_PART", PART)
    model, batch = words(4000, 64)
    plans, expected = {}, {}
    for form in FORMS:
        graph = sw.capture(model, (), batch, logits=form)
        analysis = analyze(graph)
        for text in STRATEGIES:
            plan = _plan(graph, text)
            split = plan.tilings["cross_entropy_loss"] != (None,)
            assert split or text != "classes"
            decisions = read_plan(plan, graph, analysis)
            both = [predicted(graph, analysis, decisions, rank).peak for rank in range(2)]
            plans[text, form], expected[text, form] = (plan, decisions), max(both)
    ranks = run_ranks(2, _counted, plans)
    for case, peak in expected.items():
        measured = max(found[case] for found in ranks)
        assert abs(peak / measured - 1) <= 0.02, f"{case}: {peak} predicted, {measured} counted"
    for text in STRATEGIES:
        model, fused = (max(found[text, form] for found in ranks) for form in FORMS)
        assert fused < 0.65 * model, f"{text}: {fused} of {model}"


def _counted(plans):
    half_logits._PART = PART
    return counted_peaks(partial(words, 4000, 64), plans)


def test_ranks_that_share_tokens_or_classes_have_the_modules_loss_and_gradients(monkeypatch):
    monkeypatch.setattr(half_logits, "_PART", 100)
    model, batch = words(53, 5)
    graph = sw.capture(model, (), batch)
    assert half_logits.CROSS_ENTROPY in [op.target for op in graph.ops]
    plans = {text: _plan(graph, text) for text in STRATEGIES}
    assert {plan.numerics for plan in plans.values()} == {Numerics()}
    loss = model(**batch)
    loss.backward()
    for found in run_ranks(2, _stepped, plans):
        for text, (value, gradients) in found.items():
            torch.testing.assert_close(value, loss.detach(), rtol=1e-3, atol=0, msg=text)
            for name, parameter in model.named_parameters():
                if name not in gradients:  # of another stage
                    assert text.startswith("pp=")
                    continue
                apart = (gradients[name].float() - parameter.grad.float()).norm()
                assert apart <= 0.02 * parameter.grad.float().norm(), f"{text}: {name}"


def _stepped(plans):
    half_logits._PART = 100
    found = {}
    for text, plan in plans.items():
        model, batch = words(53, 5)
        module = sw.parallelize(model, plan)
        loss = module.forward_backward(batch)
        gradients = {name: whole(p.grad) for name, p in module.named_parameters()}
        found[text] = loss.detach(), gradients
    return found
