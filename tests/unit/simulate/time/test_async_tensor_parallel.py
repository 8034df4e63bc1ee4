"""Messages of tensor parallelism beside products: what is hidden, by hand, and what is not."""

import pytest
import torch

import shardwright as sw
from shardwright.ir.plan import Phase
from shardwright.ir.redistribution import Collective
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.audit.auditor import Auditor
from shardwright.planner.plans.bandwidth_bound import bandwidth_bound
from shardwright.planner.strategies.recognition import strategy_of
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Transfer
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.report.headline import headline
from shardwright.rules.analysis import analyze
from shardwright.simulate.time.async_tensor_parallel import NOTHING, AsyncMessages, Beside
from shardwright.simulate.time.program_prices import transfer_seconds
from shardwright.tracing.op_memory.footprints import Footprints

MACHINE, RANKS = preset("4xH100"), 4
LAUNCH = MACHINE.device.launch_seconds
GATHER, SCATTER = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
ON = " async_tp=on"


@pytest.fixture(scope="module")
def graph():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, max_position_embeddings=1024, num_hidden_layers=2, hidden_size=1024,
        intermediate_size=4096, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros((16, 1024), dtype=torch.long)
    return sw.capture(model, (), {"input_ids": ids, "labels": ids})


def priced(graph, text):
    return sw.price(graph, MACHINE, text)


def of_module(plan, name):
    (found,) = (op for op in plan.ops if op.source.module == f"model.layers.1.{name}")
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_move_while_others_are_multiplied(graph, compiled):
    """Of four chunks a rank has one: three quarters of the products hide messages of three."""
    plan = priced(graph, "tp=4 async_tp=on" + (" compile=regional" if compiled else ""))
    messages = AsyncMessages(plan, graph, MACHINE)
    readers = [of_module(plan, f"mlp.{name}") for name in ("gate_proj", "up_proj")]
    down = of_module(plan, "mlp.down_proj")
    given, made = graph.op[readers[0].name].operands[0], graph.op[down.name].outputs[0]
    forward = sum(op.forward_seconds for op in readers)
    part, launches = (RANKS - 1) / RANKS, (RANKS - 1) * LAUNCH
    found = messages.of_value(given, GATHER, Phase.FORWARD)
    assert found == Beside(forward * part, 2 * launches)
    found = messages.of_value(made, SCATTER, Phase.FORWARD)
    assert found == Beside(down.forward_seconds * part, launches)
    found = messages.of_value(made, GATHER, Phase.BACKWARD)
    assert found == Beside(down.backward_seconds / 2 * part, launches)
    found = messages.of_value(given, SCATTER, Phase.BACKWARD)
    gradients = sum(op.backward_seconds / 2 for op in readers)
    assert found == (NOTHING if compiled else Beside(gradients)), "a sum is before it"
    assert messages.of_value(given, SCATTER, Phase.FORWARD) == NOTHING
    assert messages.of_value(given, GATHER, Phase.RECOMPUTE).hidden == 0, "nothing runs again"
    assert Beside(3.0, 0.5).exposed(5.0) == 2.5 and Beside(3.0, 0.5).exposed(1.0) == 0.5


@pytest.mark.parametrize("more", ["", " compile=regional", " ac=full", " mb=2 ac=every(2)"])
def test_a_step_is_shorter_by_what_is_hidden(graph, more):
    """Messages of tensor parallelism are awaited at once, so their seconds just add up."""
    plain, found = (priced(graph, f"tp=4{more}{on}") for on in ("", ON))
    messages = AsyncMessages(found, graph, MACHINE)
    decisions = read_plan(found, graph, analyze(graph))
    program = PlanLowering(graph, analyze(graph), decisions, None).program(0)
    saved = 0.0
    for one in program.instructions:
        if isinstance(one, Transfer) and len(one.parts) == 1:
            link = transfer_seconds(one, found.mesh, MACHINE).link
            beside = messages.of_transfer(one.parts[0].value, one.collective, one.channel)
            saved += link - beside.exposed(link)
    assert saved > 0.01 * plain.step_seconds
    assert plain.step_seconds - found.step_seconds == pytest.approx(saved, rel=1e-6)
    assert bandwidth_bound(found, graph, MACHINE) <= found.step_seconds
    assert found.lower_bound_seconds <= found.step_seconds and found.memory == plain.memory


def test_pipelines_hide_messages_too_and_bounds_hold(graph):
    staged = "tp=2 pp=2 mb=4"
    assert priced(graph, staged + ON).step_seconds < priced(graph, staged).step_seconds
    for text in ("tp=2 dp_shard=2", "tp=2 dp_shard=2 ac=ops(mm/2,attention) compile=regional"):
        plan = priced(graph, text + ON)
        assert 0 < bandwidth_bound(plan, graph, MACHINE) <= plan.step_seconds


def test_the_program_sends_the_same_without_the_overlap(graph):
    analysis, texts = analyze(graph), []
    for plan in (priced(graph, "tp=4"), priced(graph, "tp=4 async_tp=on")):
        lowering = PlanLowering(graph, analysis, read_plan(plan, graph, analysis), None)
        texts.append(str(lowering.program(0)))
    assert texts[0] == texts[1]
    again = plan_from_json(plan_to_json(plan))
    assert again.async_tp and strategy_of(again).async_tp
    assert "async TP: priced, messages are sent without overlap here" in headline(again)


def test_an_audit_tries_it_and_keeps_it_in_what_it_proposes(graph):
    auditor = Auditor(graph, MACHINE, "adamw", Footprints(), None)
    plain = sw.Strategy.parse("tp=4")
    for like, after in ((plain, True), (plain.but(async_tp=True), False)):
        changes = auditor.changes(auditor.price(like), every=True)
        (one,) = (c for c in changes if c.change.field == "async_tp")
        assert one.is_simulated and one.change.after is after and (one.gain > 0) == after
    assert not plain.but(async_tp=True).but(tp=1, dp_shard=4).async_tp
    best, hiding = (auditor.uniform(one) for one in (plain, plain.but(async_tp=True)))
    assert hiding.plan.step_seconds <= best.plan.step_seconds
    assert hiding.strategy.but(async_tp=False) == best.strategy
    with pytest.raises(StrategyError, match="its 4 ranks are not all in one host of 2"):
        sw.price(graph, "2x2xH100", "tp=4 async_tp=on")
