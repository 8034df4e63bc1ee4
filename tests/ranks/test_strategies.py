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
ROUTED = 1e-8  # of a mixture, whose router computes in float32 whatever the model's dtype
INSIDE = "order=dp_replicate,dp_shard,pp,cp,tp"  # stages near each other, replicas apart
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
        "dp_shard=2 ac=full mb=2 zero=1",
        "dp_shard=2 ac=ops(mm/2,attention) reshard=off",
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
        "dp_shard=2 cp=2 mb=2",
        "dp_replicate=2 tp=2 zero=0 sp=off",
        "pp=2:Interleaved1F1B/v2 dp_shard=2 mb=2",
        "pp=2 dp_shard=2 mb=4 ac=full zero=1",
        "pp=2 tp=2 mb=4 cut=1,3",
        "cp=2 tp=2 ac=first(1)",
        "pp=2:InterleavedZeroBubble/v2 dp_shard=2 mb=2 ac=ops(mm/2,attention)",
        f"pp=2 dp_shard=2 mb=4 {INSIDE}",
        f"pp=2:ZBVZeroBubble/v2 dp_replicate=2 mb=4 zero=0 {INSIDE}",
    ],
}


EXPERTS = {
    2: [
        "dp_shard=2 ep=2",
        "tp=2 ep=2",
        "tp=2 etp=1 sp=off",
        "dp_shard=2 ep=2 mb=2 ac=full",
        "dp_shard=2 etp=2",
    ],
    4: [
        "dp_shard=4 ep=2",
        "dp_shard=2 tp=2 ep=4",
        "dp_shard=2 tp=2 ep=2 etp=2",
        "tp=4 ep=2",
        "tp=4 ep=2 etp=2",
        "dp_shard=4 etp=2 ep=2",
        "pp=2 dp_shard=2 ep=2 mb=2",
    ],
}


def mixture():
    """A Mixtral whose router sends most tokens to few experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=40, max_position_embeddings=32, num_hidden_layers=2, hidden_size=32,
        intermediate_size=24, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[3] *= 8
    return models.double(models.OwnLoss(model), shallow()[1])


def dense_mixture():
    """A Llama-4, whose code computes all experts for every token; one of them has most tokens."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=40, max_position_embeddings=32, num_hidden_layers=2, hidden_size=32,
        intermediate_size=24, intermediate_size_mlp=24, interleave_moe_layer_step=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_local_experts=4,
        num_experts_per_tok=1,
    )  # fmt: skip
    model = Llama4ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].feed_forward.router.weight[3] *= 8
    return models.double(models.OwnLoss(model), shallow()[1])


def shallow():
    return models.small_llama(layers=3, hidden=32, heads=4, rows=8, length=8)


def deep():
    """With as many layers as two groups of two stages need."""
    return models.small_llama(layers=4, hidden=32, heads=4, rows=8, length=8)


@pytest.mark.parametrize("world", CASES)
def test_strategies_equal_one_device(world):
    subject = shallow if world == 2 else deep
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    plans = {text: sw.price(graph, f"{world}xcpu", text, "sgd") for text in CASES[world]}
    check(run_ranks(world, trained, plans, subject), plans)


@pytest.mark.parametrize("world, make", [(w, mixture) for w in EXPERTS] + [(4, dense_mixture)])
def test_experts_split_by_strategies_equal_one_device(world, make):
    model, batch = make()
    graph = sw.capture(model, (), batch)
    plans = {text: sw.price(graph, f"{world}xcpu", text, "sgd") for text in EXPERTS[world]}
    for text, plan in plans.items():
        weights = {one.name for one in plan.parameters}
        rows = [t for t in plan.transfers if t.value not in weights]
        sent = {one for t in rows for one in t.collectives if "all_to_all" in one}
        assert bool(sent) == ("ep=" in text), text
    check(run_ranks(world, trained, plans, make), plans, ROUTED)


def check(ranks, plans, tolerance=TOLERANCE):
    for errors in ranks:
        assert errors.keys() == plans.keys()
        for text, found in errors.items():
            worst = max(found, key=found.get)
            assert len(found) > 5 and found[worst] <= tolerance, f"{text}: {worst} {found[worst]}"


def trained(plans, make):
    """Relative errors of one step, by strategy and parameter."""
    model, batch = make()
    serial = copy.deepcopy(model)
    if make is mixture:
        serial.model.set_experts_implementation("eager")  # the default has no float64
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
