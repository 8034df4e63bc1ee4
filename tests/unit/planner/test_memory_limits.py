"""A search takes loss and MLPs in chunks, and offloads, where memory is short."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import OptionsError, PlanOptions
from shardwright.machine.presets import preset
from shardwright.planner.memory_limits import forms_to_search, offload_of, optimizers_on_host
from shardwright.planner.space_factory import SpaceFactory
from shardwright.report.answer import answer_lines
from shardwright.rules.operators.loss_chunks import LossChunksError, with_loss_chunks
from shardwright.rules.operators.mlp_chunks import MlpChunksError, with_mlp_chunks
from tests.harness.models import MeanSquare
from tests.ranks.test_offload import Blocks

MESHES = [Mesh.parse("dp=2")]
WORDS, LENGTH = 4000, 512
WIDTH, INNER = 16, 1024


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)

    def forward(self, words):
        return F.cross_entropy(self.head(self.table(words)).flatten(0, 1), words.flatten())


@pytest.fixture(scope="module")
def graph():
    with torch.device("meta"):
        return sw.capture(Words(), (torch.zeros(4, LENGTH, dtype=torch.int64),))


def _search(graph, **options):
    return sw.search(graph, "2xH100", meshes=MESHES, micro_batches=(1,), **options)


def test_plans_in_chunks_join_the_frontier_and_its_bounds(graph):
    whole, both = _search(graph, loss_chunks=(1,)), _search(graph, loss_chunks=(1, 8))
    assert {plan.numerics.loss_chunks for plan in whole} == {1}
    assert {plan.numerics.loss_chunks for plan in both} == {1, 8}
    assert both.costs[0] == whole.costs[0], "chunks never make a step faster"
    for plan in both:
        within = [one for one in (*both, *whole) if one.peak_bytes <= plan.peak_bytes]
        assert all(plan.lower_bound_seconds <= one.step_seconds for one in within)
    assert both.smallest("unlimited").peak_bytes < 0.5 * whole.smallest("unlimited").peak_bytes


def test_forms_of_the_loss_share_tables_and_have_costs_of_their_own(graph):
    chunked, asked = with_loss_chunks(graph, 8), (preset("2xH100"), MESHES[0], "adamw", 1)
    factory = SpaceFactory(graph, recompute=True)
    whole, _ = factory.space(*asked)
    shared, _ = SpaceFactory(chunked, recompute=True, other=factory).space(*asked)
    alone, _ = SpaceFactory(chunked, recompute=True).space(*asked)
    for one, other in zip(shared.problem.parts, alone.problem.parts, strict=True):
        np.testing.assert_array_equal(one.time, other.time)
        np.testing.assert_array_equal(one.memory, other.memory)
    tables = [{id(edge.time) for edge in space.problem.edges} for space in (whole, shared, alone)]
    assert tables[0] & tables[1] and not tables[0] & tables[2]


def test_chunks_are_tried_where_a_limit_asks_for_them(graph):
    whole = _search(graph, loss_chunks=(1,)).smallest("unlimited")
    assert {plan.numerics.loss_chunks for plan in _search(graph)} == {1}, "all fits"
    limit = int(0.4 * whole.peak_bytes)
    with pytest.raises(InfeasibleError):
        _search(graph, loss_chunks=(1,), memory_limit=limit).fastest(limit)
    plan = _search(graph, memory_limit=limit).fastest(limit)
    assert plan.numerics.loss_chunks > 1 and plan.peak_bytes <= limit
    assert f"loss in {plan.numerics.loss_chunks} chunks" in plan.explain()


def test_by_default_chunks_are_as_few_as_make_logits_a_small_part_of_the_limit(graph):
    machine, logits = preset("2xH100"), 4 * LENGTH * WORDS * 4 // 2  # bytes on a device

    def counts(limit):
        options = PlanOptions.of(memory_limit=limit)
        forms = forms_to_search(graph, machine, options)
        return [form.numerics.loss_chunks for form in forms.every]

    assert counts(64 * logits) == [1]
    assert counts(64 * logits - 64) == [1, 2]
    assert counts(16 * logits) == [1, 4]
    assert counts("unlimited") == [1]


def test_numbers_of_chunks_that_contradict_the_graph_are_refused(graph):
    chunked = forms_to_search(graph, preset("2xH100"), PlanOptions.of(loss_chunks=(4,))).plain[0]
    assert {plan.numerics.loss_chunks for plan in _search(chunked)} == {4}
    with pytest.raises(LossChunksError, match="captured with loss_chunks=4"):
        _search(chunked, loss_chunks=(8,))
    with pytest.raises(ValueError, match="mlp_chunks=8 is no list of counts"):
        _search(graph, mlp_chunks=8)
    with pytest.raises(MlpChunksError, match="the model has no two products"):
        _search(graph, mlp_chunks=(8,))
    with pytest.raises(ValueError, match="loss_chunks=8 is no list of counts"):
        _search(graph, loss_chunks=8)
    with pytest.raises(ValueError, match="no chunks of the loss"):
        sw.search(graph, "2xH100", method="kcut", loss_chunks=(8,))


@pytest.mark.hf
@pytest.mark.slow
def test_llama_8b_trains_on_one_small_gpu_with_its_parameters_on_the_host():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    config = LlamaConfig(**sizes, num_hidden_layers=32, num_key_value_heads=8, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros((1, 2048), dtype=torch.int64)
    graph = sw.capture(model, (), {"input_ids": tokens, "labels": tokens}, precision="bf16")
    strategy = "dp_shard=1 ac=full offload=optimizer"
    assert sw.price(graph, "1xL4", strategy).peak_bytes > 2 * preset("1xL4").device.usable_bytes
    slow = sw.Machine.preset("1xL4").with_(host_memory="192GiB")
    plan = sw.search(graph, slow, seconds=30).fastest()
    assert plan.offload[-1] == "parameters"
    assert plan.peak_bytes < slow.device.usable_bytes < plan.memory.host < 192 * 2**30
    fast = slow.with_(host_bandwidth="51.2GB/s")  # twice as much
    strategy += ",parameters"
    one, other = (sw.price(graph, machine, strategy) for machine in (slow, fast))
    assert 0.4 < other.step_seconds / one.step_seconds < 0.7


class Mlps(nn.Module):
    """Residual MLPs whose inner tensors take most of the memory."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(INNER, WIDTH) for _ in range(2))

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.silu(up(x)))
        return x.square().sum()


@pytest.fixture(scope="module")
def mlps():
    with torch.device("meta"):
        return sw.capture(Mlps(), (torch.zeros(2, LENGTH, WIDTH),))


def test_mlps_in_chunks_are_tried_where_a_limit_asks_for_them(mlps):
    whole, both = _search(mlps, mlp_chunks=(1,)), _search(mlps, mlp_chunks=(8, 1))
    assert {plan.numerics.mlp_chunks for plan in both} == {1, 8}
    assert both.costs[0] == whole.costs[0], "chunks never make a step faster"
    for plan in both:
        within = [one for one in (*both, *whole) if one.peak_bytes <= plan.peak_bytes]
        assert all(plan.lower_bound_seconds <= one.step_seconds for one in within)
    assert {plan.numerics.mlp_chunks for plan in _search(mlps)} == {1}, "all fits"
    limit = int(0.6 * whole.smallest("unlimited").peak_bytes)
    with pytest.raises(InfeasibleError):
        _search(mlps, mlp_chunks=(1,), memory_limit=limit).fastest(limit)
    plan = _search(mlps, memory_limit=limit).fastest(limit)
    assert plan.numerics.mlp_chunks > 1 and plan.peak_bytes <= limit
    assert f"MLP in {plan.numerics.mlp_chunks} chunks" in plan.explain()
    with pytest.raises(MlpChunksError, match="captured with mlp_chunks=4"):
        _search(with_mlp_chunks(mlps, 4), mlp_chunks=(8,))


def test_by_default_mlps_are_in_as_few_chunks_as_one_sample_of_a_device_asks_for(mlps):
    inner = LENGTH * INNER * 4 * 2 * 2  # bytes of product, activation, and their gradients

    def counts(limit, preset_name, **options):
        options = PlanOptions.of(memory_limit=limit, **options)
        forms = forms_to_search(mlps, preset(preset_name), options)
        return [[form.numerics.mlp_chunks for form in part] for part in forms]

    assert counts(64 * inner, "2xH100") == counts("unlimited", "2xH100") == [[1], []]
    assert counts(64 * inner - 64, "2xH100") == [[1], [2]]
    assert counts(16 * inner, "1xH100") == [[1], [4]], "micro-batches leave one sample"
    assert counts(16 * inner, "8xH100") == [[1], []], "devices share a sample"
    assert counts(16 * inner, "1xH100", mlp_chunks=(8, 1)) == [[1, 8], []]


def test_inputs_wait_on_the_host_where_a_limit_asks_for_that():
    with torch.device("meta"):
        graph = sw.capture(Blocks(0.0), (torch.zeros(65536, 8),))
    bare = _search(graph, offload=False)
    assert not any(plan.offload for plan in (*bare, *_search(graph))), "all fits"
    limit = int(0.9 * bare.smallest("unlimited").peak_bytes)
    with pytest.raises(InfeasibleError):
        _search(graph, offload=False, memory_limit=limit).fastest(limit)
    plan = _search(graph, memory_limit=limit).fastest(limit)
    assert plan.offload == ("activations",) and plan.peak_bytes <= limit
    assert plan.lower_bound_seconds <= plan.step_seconds
    assert any(note.startswith("offload saves") for note in plan.notes)
    assert "offload activations" in plan.explain()
    both = _search(graph, offload=True)
    for one in bare:  # no plan is lost
        least = min(seconds for seconds, most in both.costs if most <= one.peak_bytes)
        assert least <= 1.01 * one.step_seconds
    machine = preset("2xH100")
    alone = replace(machine, device=replace(machine.device, host_bytes_per_s=None))
    assert [offload_of(one, PlanOptions.of()) for one in (machine, alone, preset("2xcpu"))] == [
        None, False, False
    ]  # fmt: skip
    with pytest.raises(OptionsError, match="no host_bandwidth"):
        sw.search(graph, alone, offload=True)


def test_state_of_the_optimizer_and_then_parameters_are_on_the_host_where_nothing_fits_else():
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)), nn.Linear(1024, 1))
        graph = sw.capture(MeanSquare(layers), (torch.zeros(8, 1024),))
    on_device = sw.search(graph, "1xH100", offload=False)
    smallest = on_device.smallest("unlimited").peak_bytes
    limit = int(0.75 * smallest)
    with pytest.raises(InfeasibleError, match="no plan for 1 device of"):
        sw.search(graph, "1xH100", offload=False, memory_limit=limit).fastest(limit)
    found = sw.search(graph, "1xH100", memory_limit=limit)
    plan = found.fastest(limit)
    assert plan.offload == ("optimizer",) and plan.optimizer == "adamw"
    assert plan.peak_bytes <= limit < smallest
    assert plan.memory.host == 2 * sum(graph.tensor[name].bytes for name in graph.trained)
    assert plan.lower_bound_seconds <= plan.step_seconds
    priced = sw.price(graph, "1xH100", "dp_shard=1 offload=optimizer")
    assert priced.step_seconds >= plan.step_seconds
    assert "copies of the optimizer's state" in dict(answer_lines(plan, {}, None))["limited by"]
    less = int(0.25 * smallest)
    plan = sw.search(graph, "1xH100", memory_limit=less).fastest(less)
    assert plan.offload == ("optimizer", "parameters") and plan.peak_bytes <= less
    assert plan.memory.host == 4 * sum(graph.tensor[name].bytes for name in graph.trained)
    assert plan.lower_bound_seconds <= plan.step_seconds
    assert "update on the host" in dict(answer_lines(plan, {}, None))["limited by"]
    assert "offload optimizer state and parameters" in plan.explain()
    roomy = sw.search(graph, "1xH100", memory_limit=2 * smallest)
    assert all(not plan.offload for plan in roomy)
    either = sw.search(graph, "1xH100", offload=True)
    assert {plan.offload for plan in either.plans} >= {(), ("optimizer",)}
    with_sgd = PlanOptions.of(optimizer="sgd")
    assert optimizers_on_host(preset("1xH100"), with_sgd) == ("sgd_by_host",)
    assert optimizers_on_host(preset("1xcpu"), PlanOptions()) == ()
    ways = "adamw_on_host", "adamw_by_host"
    assert optimizers_on_host(preset("1xH100"), PlanOptions()) == ways
    assert optimizers_on_host(preset("2xH100"), PlanOptions.of(stages=(2,))) == ways[:1]
