"""`verify` says yes to plans that are right, and no when one side computes something else."""

import re
from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.graph_text import graph_from_json, graph_to_json
from shardwright.runtime.ranks import RanksError
from shardwright.runtime.verify import verify as verify_module
from tests.harness import models
from tests.harness.ranks import verify_forks

pytestmark = pytest.mark.ranks


@pytest.fixture
def forked():
    """Ranks that need not be started by torchrun."""
    with verify_forks():
        yield


def planned(model, batch, choice="fully sharded", optimizer="adamw"):
    frontier = sw.search(sw.capture(model, (), batch), sw.Machine.preset("2xcpu"), optimizer)
    return {plan.name: plan for plan in frontier.baselines}[choice]


@pytest.mark.hf
def test_a_right_plan_is_verified():
    model, batch = models.gpt2(heads=2, hidden=12)
    before = [p.detach().clone() for p in model.parameters()]
    report = sw.verify(model, planned(model, batch, "tensor parallel"), (), batch)
    assert report.ok
    assert report.devices == 2
    errors = report.loss_error, report.max_gradient_error, report.max_parameter_error
    assert all(0 <= error < 1e-9 for error in errors)
    assert report.capture_error < 1e-9
    assert report.compared_in == "float64"
    assert "the plan on 2 ranks equals one device" in str(report)
    assert model.training, "the module is as it was"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.usefixtures("forked")
def test_a_module_without_loss_is_verified():
    model, batch = models.no_loss()
    assert sw.verify(model, planned(model, batch, optimizer="sgd"), (), batch).ok


def corrupt(monkeypatch, change):
    """The serial side has run when the payload is written that the ranks read: change that."""

    def save(payload, path):
        change(payload)
        torch.serialization.save(payload, path)

    monkeypatch.setattr(verify_module.torch, "save", save)


def replace_graph(payload, **changes):
    graph = replace(graph_from_json(payload["graph"]), **changes)
    payload["graph"], payload["fingerprint"] = graph_to_json(graph), graph.fingerprint


@pytest.mark.usefixtures("forked")
def test_another_weight_on_the_ranks_is_found(monkeypatch):
    def change(payload):
        payload["weights"]["up.weight"][2, 1] += 1e-3

    corrupt(monkeypatch, change)
    report = verify_of_mlp()
    assert not report.ok
    assert report.loss_error > 1e-8
    assert 1e-4 < report.max_parameter_error < 1e-2
    assert "DIFFERS" in str(report)


@pytest.mark.usefixtures("forked")
def test_a_lost_gradient_is_found_and_named(monkeypatch):
    """One parameter gets no gradient on the ranks: `worst` says which, and who reads it."""

    def change(payload):
        values = graph_from_json(payload["graph"]).values
        frozen = [replace(v, requires_grad=False) if v.name == "up.bias" else v for v in values]
        replace_graph(payload, values=tuple(frozen))

    corrupt(monkeypatch, change)
    report = verify_of_mlp()
    assert not report.ok
    assert report.loss_error < 1e-9
    assert report.max_gradient_error == float("inf")
    assert report.worst.tensor == "up.bias"
    assert report.worst.source.module == "up"
    assert re.fullmatch(r"up\.bias \(read by linear, up \(.*:\d+\)\)", str(report.worst))


def test_a_plan_for_one_device_starts_no_process(monkeypatch):
    """Of a run on one GPU that took a minute and a half, most was the start of four processes."""
    model, batch = models.mlp()
    plan = sw.price(sw.capture(model, (), batch), "1xcpu", "mb=1", "adamw")
    monkeypatch.setattr(verify_module, "run_ranks", None)
    report = sw.verify(model, plan, (), batch)
    assert report.ok and report.devices == 1
    assert not torch.distributed.is_initialized()
    right = verify_module.measured_on_ranks

    def measured(payload):
        payload["weights"]["up.weight"][2, 1] += 1e-3
        return right(payload)

    monkeypatch.setattr(verify_module, "measured_on_ranks", measured)
    assert not sw.verify(model, plan, (), batch).ok


def verify_of_mlp():
    model, batch = models.mlp()
    return sw.verify(model, planned(model, batch, "data parallel"), (), batch)


def test_verify_refuses_what_it_cannot_run():
    model, batch = models.mlp()
    plan = planned(model, batch)
    with pytest.raises(PlanError, match="made for another model or other shapes"):
        sw.verify(*models.mlp(batch=4)[:1], plan, (), models.mlp(batch=4)[1])
    with pytest.raises(PlanError, match="verify needs a model with weights"):
        sw.verify(model.to("meta"), plan, (), {k: v.to("meta") for k, v in batch.items()})


def test_ranks_that_fail_say_why(monkeypatch):
    """And not what the launcher has to say about it."""
    corrupt(monkeypatch, lambda payload: payload.update(fingerprint="of another"))
    with pytest.raises(RanksError) as failed:
        verify_of_mlp()
    assert "2 ranks of shardwright.runtime.verify.worker failed" in str(failed.value)
    assert "PlanError: the plan was made for another model" in str(failed.value)
    assert "elastic" not in str(failed.value)
