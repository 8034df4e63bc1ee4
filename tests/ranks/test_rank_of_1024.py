"""A step of one rank of 1,024, on the meta device: no reads of values, and the counted transfers.

Five models under three plans: sharded in hybrid with tensor parallelism, sharded over all ranks,
and a pipeline, of whose last stage the rank is. The suite runs a third of the fifteen pairs, every
model and every plan among them, and `scripts/campaign_large_world.py` all.
"""

from itertools import product

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Recv
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import analyze
from tests.harness.fake_rank import SPEC, fake_world, guarded
from tests.harness.ranks import run_ranks
from tests.harness.rotation import rotating

pytestmark = pytest.mark.ranks

WORLD, RANK, WIDTH, INNER, WORDS = 1024, 517, 1024, 2048, 2048
HYBRID = "dp_replicate=32 dp_shard=8 tp=4"
SHARDED = "dp_shard=1024"
PIPELINE = "pp=2 dp_shard=64 tp=8 mb=4 cut=1,1"
STRATEGIES = (HYBRID, SHARDED, PIPELINE)
_SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 16}
_DECODER = {**_SIZES, "vocab_size": WORDS, "num_hidden_layers": 2, "num_key_value_heads": 8}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=16, n_layer=2, n_embd=WIDTH, n_head=16)
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_DECODER))


def mixtral() -> nn.Module:
    config = MixtralConfig(**_DECODER, num_local_experts=8)
    return MixtralForCausalLM(config).bfloat16()  # float32 has no grouped products on a device


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_ff=INNER, num_heads=16, num_layers=1,
            num_decoder_layers=1, dropout_rate=0.0, decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(**_SIZES, num_hidden_layers=2, image_size=32, patch_size=8, num_labels=WORLD)
    )


def batch_of(make):
    if make is vit:
        images = torch.zeros(WORLD, 3, 32, 32, device="meta")
        return {"pixel_values": images, "labels": torch.zeros(WORLD, dtype=torch.long).to("meta")}
    ids = torch.zeros(WORLD, 16, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def steps_of(make, strategies):
    """Kernels of a step of the module itself; of each strategy, what a step did and was to do."""
    torch.manual_seed(0)
    model, batch = make(), batch_of(make)
    graph = sw.capture(model, (), batch)
    analysis = analyze(graph)
    found = []
    with fake_world(RANK, WORLD) as backend:
        for text in strategies:
            plan = sw.price(graph, "128x8xH100", text, "sgd")
            parallel = sw.parallelize(model, plan, device="meta")
            optimizer = torch.optim.SGD(parallel.parameters(), momentum=0.9)
            parallel.train_step(optimizer, batch)  # the first compares batches
            optimizer.zero_grad()
            for calls in (backend.begun, backend.messages, backend.within):
                calls.clear()
            with guarded() as guard:
                parallel.forward_backward(batch)
            with guarded() as update:  # of tiles, as their DTensors need a device for it
                optimizer.step()
            decisions = read_plan(plan, graph, analysis)
            program = PlanLowering(graph, analysis, decisions, SPEC.alone_bytes).program(RANK)
            found.append(
                {
                    "begun": tuple(backend.begun),
                    "wanted": tuple(transfers_of(program, dict(plan.mesh.axes))),
                    "messages": sorted(kind for kind, *_ in backend.messages),
                    "wanted messages": sorted(
                        "receive" if isinstance(one, Recv) else "send" for one in program.messages()
                    ),
                    "within": [call[:2] for call in backend.within],
                    "forbidden": guard.forbidden,
                    "kernels": guard.kernels,
                    "update": (update.forbidden, update.kernels),
                    "updated": sum(one.grad is not None for one in parallel.parameters()),
                }
            )
    with guarded() as guard:
        model.to("meta")(**batch).loss.backward()
    return guard.kernels, found


def transfers_of(program, sizes):
    for one in program.transfers():
        yield one.collective.value, sizes[one.channel.split(":")[0]], one.bytes


MODELS = (gpt2, llama, mixtral, t5, vit)
PAIRS = rotating(product(MODELS, STRATEGIES), 5, kinds=lambda pair: pair)


def check(make, strategies):
    """Raise `AssertionError` unless a step does what its program has, and nothing forbidden."""
    ((plain, found),) = run_ranks(1, steps_of, make, strategies)
    for text, step in zip(strategies, found, strict=True):
        assert step["forbidden"] == [], text
        forbidden, kernels = step["update"]
        assert forbidden == [] and kernels <= 4 * step["updated"], text
        assert step["begun"] == step["wanted"], text
        assert step["messages"] == step["wanted messages"], text
        # Operators wait for sums of their own: maxima and sums over a vocabulary that is split.
        sums = {HYBRID: [("all_reduce", 4)] * 2, PIPELINE: [("all_reduce", 8)] * 8}
        assert step["within"] == sums.get(text, []), text
        if text == SHARDED:
            # Packing of buckets and rows of split batches; masks of `rng="exact"` by their formula.
            assert step["kernels"] <= plain * (2.5 if make is gpt2 else 1.4), text


@pytest.mark.parametrize("make", MODELS)
def test_a_step_begins_what_its_program_has_and_never_waits_for_the_host(make):
    check(make, [strategy for one, strategy in PAIRS if one is make])
