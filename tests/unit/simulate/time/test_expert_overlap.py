"""Messages of experts beside another micro-batch: what is hidden, and what stays as it is."""

import pytest
import torch

import shardwright as sw
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.audit.auditor import Auditor
from shardwright.planner.plans.bandwidth_bound import bandwidth_bound
from shardwright.planner.strategies.recognition import strategy_of
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.report.headline import headline
from shardwright.rules.analysis import analyze
from shardwright.tracing.op_memory.footprints import Footprints

MACHINE, PLAIN = preset("4xH100"), "dp_shard=4 ep=4 mb=2 zero=1"
ON = PLAIN + " ep_overlap=on"


@pytest.fixture(scope="module")
def graph():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, max_position_embeddings=256, num_hidden_layers=2, hidden_size=256,
        intermediate_size=512, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = MixtralForCausalLM(config), torch.zeros((32, 256), dtype=torch.long)
    return sw.capture(model, (), {"input_ids": ids, "labels": ids})


def test_a_step_is_shorter_by_what_is_hidden_of_the_messages(graph):
    plain, beside = (sw.price(graph, MACHINE, text) for text in (PLAIN, ON))
    messages = [
        one
        for one in plain.transfers
        if one.value == one.consumer and one.collectives[0].startswith("all_to_all")
    ]
    assert len(messages) == 2 * 2  # of two layers, forward and backward
    hidden = MACHINE.overlap * sum(one.seconds for one in messages)
    saved = plain.step_seconds - beside.step_seconds
    assert saved == pytest.approx(hidden, rel=0.02) and hidden > 0.05 * plain.step_seconds
    assert beside.peak_bytes == plain.peak_bytes
    assert 0 < bandwidth_bound(beside, graph, MACHINE) <= beside.step_seconds


def test_the_program_sends_the_same(graph):
    analysis, texts = analyze(graph), []
    for text in (PLAIN, ON):
        plan = sw.price(graph, MACHINE, text)
        lowering = PlanLowering(graph, analysis, read_plan(plan, graph, analysis), None)
        texts.append(str(lowering.program(0)))
    assert texts[0] == texts[1]
    again = plan_from_json(plan_to_json(plan))
    assert again.ep_overlap and strategy_of(again).ep_overlap
    assert "experts beside others: priced, sent without overlap here" in headline(again)


def test_an_audit_compares_with_strategies_that_hide_them_too(graph):
    auditor = Auditor(graph, MACHINE, "adamw", Footprints(), None)
    plain, beside = (auditor.uniform(sw.Strategy.parse(text)) for text in (PLAIN, ON))
    assert beside.plan.step_seconds <= plain.plan.step_seconds
    assert beside.strategy.but(ep_overlap=False) == plain.strategy
