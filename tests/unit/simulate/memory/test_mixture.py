"""Memory of mixtures whose experts are spread over devices."""

from dataclasses import replace
from math import ceil

import pytest
import torch

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import tilings
from shardwright.simulate.memory import mixture
from shardwright.tracing.gradients.autograd import observe
from tests.harness.peak_memory import predicted

MESH = Mesh.parse("a=2 b=2")
LAYERS = 3


def mixtral():
    """Experts of which each fills a bucket of its own, and more rows than they have weights."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=19,
        hidden_size=256,
        intermediate_size=16384,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    ids = torch.randint(19, (512, 4))
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.hf
def test_copies_of_experts_that_are_gathered_again_are_not_kept(monkeypatch):
    sent = []
    known = mixture.exchange_bytes
    monkeypatch.setattr(
        mixture, "exchange_bytes", lambda *given: sent.append(given[1]) or known(*given)
    )
    model, batch = mixtral()
    graph = sw.capture(model, (), batch)
    analysis = analyze(graph)
    mixtures = [op for op in graph.ops if op.kind == "experts"]
    chosen = {op.name: (None, None) for op in graph.ops}
    for op in mixtures:
        rule = analysis.rules[op.name]
        chosen[op.name] = next(
            tiling
            for tiling, _ in tilings(rule, MESH)
            if list(map(str, tiling)) == ["n.0>e", "n.0"]
        )
    experts = {name for op in mixtures for name in op.operands[3:5]}
    storage = {
        leaf.name: Layout.parse("a:S(0) b:S(0)", MESH)
        if leaf.name in experts
        else Layout.replicated(MESH)
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
    }
    kept = Decisions(MESH, chosen, storage)
    again = replace(kept, regathered=frozenset(experts))
    up, down = (graph.tensor[name].bytes // 2 for name in mixtures[0].operands[3:5])
    saved = predicted(graph, analysis, kept).peak - predicted(graph, analysis, again).peak
    # When most is held the last layer's are there again, and the first of the next one's come.
    assert saved == pytest.approx((LAYERS - 1) * (up + down) - up, rel=0.01)
    # Of two experts that a token chooses of four, both are on the other device with 1/2 · 1/3: it
    # goes to 5/3 of two devices.
    tokens = 512 * 4 // 4
    assert set(sent) == {tokens * ceil(256 * 4 * 5 / 3)}


def test_a_part_that_is_kept_keeps_all_of_its_memory():
    def halves(values):
        whole = values[0] * 2.0
        return [whole.chunk(2, -1)[0].square()]

    leaf = torch.empty(4, 6, device="meta", requires_grad=True)
    assert observe(halves, [leaf]).extra_saved == 4 * 6 * 4
