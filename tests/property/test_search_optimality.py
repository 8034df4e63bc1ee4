"""The fast frontier against an independent mixed-integer program, on spaces of real plans.

`benchmarks/search` does the same with full budgets, ten limits and five models on both meshes.
"""

import pytest
import torch

import shardwright as sw
from benchmarks.search.models import SHALLOW
from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.space.space import make_space
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.solve.frontier.fast import Effort, fast_frontier
from tests.harness.generators import as_lists
from tests.harness.layered_graphs import residual_layers
from tests.harness.oracles import integer_program
from tests.harness.rotation import rotating


def check(graph, machine, mesh, limits):
    model = CostModel(graph, analyze(graph), preset(machine), Mesh.parse(mesh))
    problem = make_space(model).problem
    found = fast_frontier(problem, Effort(max_points=300))
    most, least = found.points[0].memory, found.points[-1].memory
    for part in rotating(range(limits), 3):
        limit = int(least + (most - least) * (part + 0.5) / limits)
        best = integer_program(*as_lists(problem), limit)
        fast = min(point.time for point in found.points if point.memory <= limit)
        assert best * (1 - 1e-6) <= fast <= best * 1.005
        assert best * 0.98 <= found.lower_bound(limit) <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    "machine, mesh, limits",
    [
        ("8xH100", "dp=8", 10),
        ("8xH100", "dp=4 tp=2", 3),
        ("4x2xA100", "dp=8", 10),
        ("4x2xA100", "dp=4 tp=2", 10),
    ],
)
def test_the_fast_frontier_is_optimal_to_half_a_percent_and_its_bound_below(machine, mesh, limits):
    check(residual_layers(1), machine, mesh, limits)


@pytest.mark.parametrize("name", SHALLOW)
def test_real_models_of_one_layer_are_optimal_to_half_a_percent(name):
    with torch.device("meta"):
        model, batch = SHALLOW[name]()
    check(sw.capture(model, (), batch), "4x2xA100", "dp=8", 3)


def test_a_layer_of_llama_on_two_axes_is_proved_optimal_to_half_a_percent_given_the_budget():
    """No program is asked: the bound itself says so, at ten limits."""
    with torch.device("meta"):
        model, batch = SHALLOW["llama-8b, 1 layer"]()
    graph = sw.capture(model, (), batch)
    costs = CostModel(graph, analyze(graph), preset("8xH100"), Mesh.parse("dp=4 tp=2"))
    found = fast_frontier(make_space(costs).problem, Effort(max_points=300, max_sums=20_000_000))
    most, least = found.points[0].memory, found.points[-1].memory
    for part in range(10):
        limit = int(least + (most - least) * (part + 0.5) / 10)
        fast = min(point.time for point in found.points if point.memory <= limit)
        assert found.lower_bound(limit) <= fast <= found.lower_bound(limit) * 1.005
