"""Plans for trainers, and checkpoints of what they train."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.integrations.planned_runs import (
    found_plan,
    planned_module,
    resume_run,
    save_run,
)
from shardwright.ir.plan import PlanError
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from tests.harness.trainers.classifier import BATCH, Classifier, data


def test_a_plan_needs_a_machine():
    with pytest.raises(PlanError, match="give a plan, or the machine"):
        found_plan(Classifier(), data()[:BATCH], {}, None, "model")


def test_a_plan_returns_what_is_asked_for():
    plan = found_plan(Classifier(), data()[:BATCH], {}, "1xcpu", "model")
    found = planned_module(Classifier(), plan, "model")(*data()[:BATCH])
    assert found["scores"].shape == (BATCH, 4)
    assert (plan.stages, plan.micro_batches, plan.numerics.loss_chunks) == (1, 1, 1)


def test_a_pipeline_has_nothing_to_call():
    with pytest.raises(PlanError, match="no forward pass for a trainer to call"):
        planned_module(Classifier(), SimpleNamespace(pipeline="1F1B"), "loss")


def test_a_run_goes_on_from_what_was_saved(tmp_path):
    plan = found_plan(Classifier(), data()[:BATCH], {}, "1xcpu", "model")

    def begun():
        module = planned_module(Classifier(), plan, "model")
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return module, optimizer, schedule

    def steps(run):
        module, optimizer, schedule = run
        for _ in range(3):
            optimizer.zero_grad()
            module(*data()[:BATCH])["loss"].backward()
            optimizer.step()
            schedule.step()
        return module.state_dict()

    first = begun()
    steps(first)
    save_run(tmp_path, plan, *first, step=3)
    drawn = torch.rand(1)
    expected = {key: value.clone() for key, value in steps(first).items()}
    second = begun()
    resume_run(tmp_path, plan, *second)
    assert torch.equal(torch.rand(1), drawn)
    torch.testing.assert_close(dict(steps(second)), expected, rtol=0, atol=0)


def test_a_folder_without_the_ranks_parts_is_named(tmp_path):
    plan = found_plan(Classifier(), data()[:BATCH], {}, "1xcpu", "loss")
    module = planned_module(Classifier(), plan, "loss")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="has no 'sharded'"):
        resume_run(tmp_path, plan, module, optimizer)
