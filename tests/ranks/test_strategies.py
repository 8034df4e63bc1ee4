"""Uniform strategies on ranks train as one device does: loss and every parameter after a step."""

import copy

import pytest
import torch

import shardwright as sw
from tests.harness import models
from tests.harness.ranks import run_ranks, whole
from tests.ranks.test_random_tilings import error

pytestmark = [pytest.mark.ranks, pytest.mark.hf]

TOLERANCE = 1e-12
CASES = {
    2: [
        "dp_replicate=2 zero=0",
        "dp_shard=2 zero=2 mb=2",
        "dp_shard=2 zero=1 mb=2",
        "dp_shard=2 mb=2 sync=last",
        "dp_replicate=2 zero=0 mb=2 sync=every",
        "tp=2 sp=off",
        "tp=2 ac=full",
        "cp=2",
        "cp=2 cp_style=all-gather",
        "cp=2 cp_style=ulysses",
        "dp_shard=2 ac=every(2) mb=2",
        "tp=2 ac=ops(mm/2,attention)",
        "dp_shard=2 ac=ops(mm/2,attention) mb=2",
        "dp_shard=2 ac=children zero=2",
        "tp=2 ac=modules(mlp,core_attn,layernorm)",
        "dp_shard=2 ac=groups(2) mb=2",
        "dp_shard=2 ac=budget(0.5)",
    ],
    4: [
        "dp_replicate=2 dp_shard=2",
        "dp_shard=2 tp=2",
        "dp_replicate=2 tp=2 zero=0 sp=off",
        "pp=2:Interleaved1F1B/v2 dp_shard=2 mb=2",
        "pp=2 dp_shard=2 mb=4 ac=full zero=1",
        "pp=2 tp=2 mb=4 cut=2,3",
        "cp=2 tp=2 ac=first(1)",
        "pp=2:InterleavedZeroBubble/v2 dp_shard=2 mb=2 ac=ops(mm/2,attention)",
    ],
}


def subject():
    return models.small_llama(layers=5, hidden=32, heads=4, rows=8, length=8)


@pytest.mark.parametrize("world", CASES)
def test_strategies_equal_one_device(world):
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    plans = {text: sw.price(graph, f"{world}xcpu", text, "sgd") for text in CASES[world]}
    for errors in run_ranks(world, trained, plans):
        assert errors.keys() == plans.keys()
        for text, found in errors.items():
            worst = max(found, key=found.get)
            assert len(found) > 10 and found[worst] <= TOLERANCE, f"{text}: {worst} {found[worst]}"


def trained(plans):
    """Relative errors of one step, by strategy and parameter."""
    model, batch = subject()
    serial = copy.deepcopy(model)
    loss = serial(**batch)
    loss.backward()
    torch.optim.SGD(serial.parameters(), lr=0.1).step()
    found = {}
    for text, plan in plans.items():
        parallel = sw.parallelize(copy.deepcopy(model), plan, seed=5)
        step = torch.optim.SGD(parallel.parameters(), lr=0.1)
        errors = {"loss": error(loss.detach(), parallel.train_step(step, batch))}
        for key, parameter in parallel.named_parameters(remove_duplicate=False):
            errors[key] = error(serial.get_parameter(key).detach(), whole(parameter))
        found[text] = errors
    return found
