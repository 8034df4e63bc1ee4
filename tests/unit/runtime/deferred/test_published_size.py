"""Llama 3 70B on 8 x 80 GB, without a byte of its weights: what each rank would compute."""

import math

import pytest
import torch

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.runtime.deferred.chunks import ChunkedSteps
from shardwright.runtime.deferred.ranges import ranges_of
from shardwright.runtime.deferred.sources import deferred, sources_of
from tests.harness.peak_memory import resident_growth

pytestmark = [pytest.mark.hf, pytest.mark.slow]
RANKS, GB = 8, 10**9


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def test_ranks_compute_their_tiles_of_70_billion_parameters_and_no_more():
    model, grown = resident_growth(lambda: deferred(llama))
    size = sum(p.nbytes for p in model.parameters())
    assert size > 280 * GB
    assert grown < 0.3 * GB  # modules and records of calls
    sources = sources_of(model)
    sources.check(model)

    ids = torch.zeros(8, 4096, dtype=torch.long, device="meta")
    graph = sw.capture(model, kwargs={"input_ids": ids, "labels": ids})
    plan = sw.price(graph, f"{RANKS}xH100", "dp_shard=8")
    analysis = analyze(graph)
    decisions = read_plan(plan, graph, analysis)
    weights = dict(model.named_parameters())
    shares, whole = [0] * RANKS, 0
    for leaf in graph.leaves:
        weight = weights.get(leaf.keys[0]) if leaf.keys else None
        if weight is None:
            continue
        atoms, layout = analysis.atoms[leaf.name], decisions.storage[leaf.name]
        for rank in range(RANKS):
            ranges = ranges_of(weight.shape, atoms, layout, plan.mesh.coordinate(rank))
            count = math.prod(stop - start for start, stop in ranges)
            shares[rank] += count * weight.element_size()
        reference = sources.recording.ref(weight.detach())
        live, unknown = sources.recording.replay._needed(reference)
        if unknown or ChunkedSteps.of(reference, live) is None:
            whole = max(whole, weight.nbytes)
    assert sum(shares) == size
    assert max(shares) < 36 * GB
    assert max(shares) <= size / RANKS * 1.001
    assert whole <= 2**16  # all larger ones are drawn in chunks
