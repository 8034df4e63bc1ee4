"""A search in several processes finds what it finds in one, to the bit."""

import pytest
import torch

from shardwright.api import capture
from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.planner.processes import forked_map
from shardwright.planner.processes.foresight import Foresight
from shardwright.planner.processes.forked_map import ForkedMap
from shardwright.planner.strategies.preference import is_strategy, preferred
from shardwright.report.other_plans import other_plans
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import residual_layers
from tests.harness.rotation import rotating


@pytest.fixture
def forked(monkeypatch):
    """What was computed in processes: the names of functions, each with its number of results."""
    found = []
    fork = ForkedMap._fork

    def counted(self, function, items, numbers, results):
        fork(self, function, items, numbers, results)
        known = sum(results[number] is not None for number in numbers)
        found.append((function.__qualname__.split(".")[0], known))

    monkeypatch.setattr(ForkedMap, "_fork", counted)
    monkeypatch.setattr(forked_map, "may_fork", lambda: True)
    monkeypatch.setattr(forked_map, "_LEAST_SECONDS", 0.0)
    return found


MESHES = ("dp=8", "dp=2 tp=4", "dp=4 tp=2")


def told(graph, machine, processes, tracer):
    """All that is shown of a search: its frontier, the chosen plan and others, within a limit."""
    meshes = [Mesh.parse(mesh) for mesh in MESHES]
    options = PlanOptions.of(processes=processes, meshes=meshes, micro_batches=(1, 2))
    front = search(graph, preset(machine), options, tracer=tracer)
    limit = (front[0].peak_bytes + 2 * front.smallest().peak_bytes) // 3
    chosen = preferred(front, limit)
    others = other_plans(chosen.plan, front, limit)
    plans = chosen.plan, *others.simulated.values(), *front.all_settled(4)
    return front.costs, str(chosen), [plan_to_json(one) for one in plans]


def test_strategies_that_may_be_preferred_are_simulated_at_once(forked, monkeypatch):
    graph, asked, plain = residual_layers(12, inner=lambda _: 64), [], Foresight.expect

    def noted(self, *, deepened=(), **others):
        asked.append([is_strategy(one) for one in deepened])
        plain(self, deepened=deepened, **others)

    monkeypatch.setattr(Foresight, "expect", noted)
    options = PlanOptions.of(processes=3, micro_batches=(1,))
    front = search(graph, preset("2x4xH100"), options, tracer=Footprints())
    limit = (front[0].peak_bytes + 2 * front.smallest().peak_bytes) // 3
    assert preferred(front, limit).uniform is not None
    assert any(len(these) > 1 and all(these) for these in asked)


def mixture():
    """The graph of a small mixture of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
        ids = torch.zeros((16, 16), dtype=torch.long)
    return capture(model, kwargs={"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("make", "machine"),
    rotating(
        [
            (lambda: residual_layers(12, inner=lambda _: 64), "2x4xH100"),
            (lambda: residual_layers(3), "8xcpu"),
            pytest.param(mixture, "8xA100", marks=pytest.mark.hf),
        ],
        3,
    ),
)
def test_plans_are_those_of_one_process(forked, make, machine):
    graph, tracer = make(), Footprints(on_cpu=machine == "8xcpu")
    alone = told(graph, machine, 1, tracer)
    assert forked == []
    assert told(graph, machine, 3, tracer) == alone
    assert sum(known for name, known in forked if name == "MeshesAhead") >= 3
    assert sum(known for name, known in forked if name == "Foresight") >= 3
