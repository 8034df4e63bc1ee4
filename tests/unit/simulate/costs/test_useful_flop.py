import pytest
import torch

import shardwright as sw
from shardwright.report.answer import answer_lines
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.useful_flop import useful_flop


def test_a_decoder_needs_six_per_parameter_and_token_and_causal_attention():
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, vocabulary, batch, tokens = 3, 64, 96, 4, 32
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=80,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros((batch, tokens), dtype=torch.long)
    graph = sw.capture(model, (), {"input_ids": ids, "labels": ids})
    matrices = layers * (4 * hidden**2 + 3 * hidden * 80) + vocabulary * hidden
    attention = 12 * layers * hidden * tokens / 2
    wanted = batch * tokens * (6 * matrices + attention)
    found = useful_flop(graph, analyze(graph))
    assert found == pytest.approx(wanted, rel=1e-2)
    machine = sw.Machine.preset("2xH100")
    plan = sw.search(graph, machine).fastest()
    devices = 2 * machine.device.peak_flop_per_s("float32") * plan.step_seconds
    assert plan.utilisation == pytest.approx(found / devices)
    shown = f"MFU {plan.utilisation:.1%}"
    assert shown in plan.explain() and shown in dict(answer_lines(plan, (), None))["speed"]
    again = sw.Plan.from_json(plan.to_json())
    assert again.utilisation == plan.utilisation
