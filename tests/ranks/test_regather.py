"""Regathered parameters: autograd keeps less, and what it computes stays the same."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from tests.harness import models
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks


def fully_sharded(regathered):
    model, batch = models.double(*models.mlp())
    frontier = sw.search(sw.capture(model, (), batch), sw.Machine.preset("2xcpu"))
    name = "fully sharded" if regathered else "ZeRO-2"
    (plan,) = (plan for plan in frontier.baselines if plan.name == name)
    assert any(p.regathered for p in plan.parameters) == regathered
    return plan_to_json(plan)


def test_autograd_keeps_no_copy_of_a_regathered_parameter():
    texts = [fully_sharded(regathered) for regathered in (False, True)]
    run_ranks(2, _compare, texts)


def _compare(texts):
    found = []
    for text in texts:
        model, batch = models.double(*models.mlp())
        module = sw.parallelize(model, sw.Plan.from_json(text))
        kept = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = module(**batch)
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in module.named_parameters()}
        found.append((sum(kept.values()), gradients))
    (kept, expected), (fewer, gradients) = found
    weights = [p for p in model.parameters() if p.dim() > 1][1:]  # the input needs no gradient
    assert kept - fewer >= sum(p.numel() * 8 for p in weights)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)
