"""Micro-batches as a choice of the search: what they cost, save, and when they are tried."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.api import search_with as search
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Phase
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.micro_batch_counts import MicroBatchCounts
from shardwright.planner.tables.layout_codes import (
    FIRST_ATOM,
    SUMS,
    WHOLE,
    encode,
    summed_gradients,
)
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.pricing import Pricing
from shardwright.planner.tight_memory import if_tight
from shardwright.rules.analysis import analyze
from shardwright.rules.micro_batches import MicroBatchError
from tests.harness.layered_graphs import BATCH, residual_layers
from tests.harness.plan_simulations import FunctionSimulation
from tests.harness.plans import added_seconds, fastest_by_sums
from tests.unit.planner.test_planner import priced_from_scratch

MACHINE = preset("8xH100")
SERIAL = replace(MACHINE, overlap=0.0)
MESH = Mesh.parse("dp=8")
GRAPH = residual_layers(3)
ANALYSIS = analyze(GRAPH)


@pytest.fixture(scope="module")
def frontier():
    return search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH], micro_batches=(1, 2, 4)))


def test_micro_batches_extend_the_frontier_to_less_memory(frontier):
    plain = search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH]))
    counts = [plan.micro_batches for plan in frontier]
    assert set(counts) == {1, 2, 4}
    assert frontier.plans[-1].peak_bytes < 0.7 * plain.plans[-1].peak_bytes
    assert frontier.smallest().peak_bytes < plain.smallest().peak_bytes
    assert frontier[0].step_seconds == plain[0].step_seconds
    for plan in plain:
        shown = plain.settled(plan)
        assert frontier.fastest(shown.peak_bytes).step_seconds <= shown.step_seconds * (1 + 2e-3)
    assert {plan.micro_batches for plan in (*plain, *frontier.baselines)} == {1}


def test_every_plan_costs_what_it_says(frontier):
    for plan in frontier:
        graph, analysis = MicroBatchCounts(GRAPH, ANALYSIS).analyzed(plan.micro_batches)
        seconds, held = priced_from_scratch(plan, graph, analysis, plan.micro_batches)
        assert plan.step_seconds == pytest.approx(seconds, rel=1e-9)
        assert held < plan.peak_bytes
    for plan in search(GRAPH, SERIAL, PlanOptions.of(meshes=[MESH], micro_batches=(1, 2, 4))):
        assert (
            -1e-12 < plan.step_seconds - added_seconds(plan, SERIAL) < 4e-4
        )  # bringing the loss everywhere


def test_bounds_hold_for_the_whole_space(frontier):
    for plan in frontier:
        assert 0 < plan.lower_bound_seconds <= plan.step_seconds
    alone = [
        search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH], micro_batches=(m,))) for m in (1, 2, 4)
    ]
    for plan in frontier:
        for other in (other for front in alone for other in front):
            if other.peak_bytes <= plan.peak_bytes:
                assert plan.lower_bound_seconds <= other.step_seconds


def test_the_exact_frontier_bounds_the_fast_one():
    tiny = residual_layers(1, inner=lambda _: 2048)
    mesh = [Mesh.parse("dp=2")]
    two = preset("2xH100")
    exact = search(tiny, two, PlanOptions.of(meshes=mesh, micro_batches=(1, 2), exact=True))
    fast = search(tiny, two, PlanOptions.of(meshes=mesh, micro_batches=(1, 2)))
    assert exact[0].step_seconds == pytest.approx(fast[0].step_seconds)
    assert exact.plans[-1].peak_bytes <= fast.plans[-1].peak_bytes  # memory in order of the graph
    assert exact.plans[-1].micro_batches == 2
    for plan in fast:
        best = fastest_by_sums(exact, plan.peak_bytes).step_seconds
        assert plan.lower_bound_seconds <= best * (1 + 1e-9)


def test_a_replicated_parameter_is_reduced_once_and_a_sharded_one_each_time():
    graph, analysis = MicroBatchCounts(GRAPH, ANALYSIS).analyzed(4)
    model = CostModel(graph, analysis, SERIAL, MESH, Pricing(micro_batches=4))
    op = next(op for op in graph.ops if op.name == "first")
    k = next(
        k for k in range(len(model.options(op))) if model.options(op).operands[0, k] == FIRST_ATOM
    )
    want = tuple(int(side[1, k]) for side in (model.options(op).operands, model.options(op).grads))
    assert want == (WHOLE, SUMS)

    def moved(layout):
        code = encode(Layout.parse(layout, MESH), analysis.atoms["first.weight"])
        found = model.transfers("first.weight", code, want, op)
        edge = model.edge("first.weight", np.array([code]), op, [1])
        assert edge.seconds[0, k] == pytest.approx(sum(t.seconds for t in found))
        return [(t.phase == "backward", t.times, *t.collectives) for t in found]

    assert moved("dp:R") == [(True, 1, "all_reduce dp")]
    assert moved("dp:S(0)") == [
        (False, 1, "all_gather dp"),  # one copy is kept for all micro-batches
        (True, 4, "reduce_scatter dp"),
    ]


def test_terms_of_gradients_are_summed_in_tiles_of_the_parameter():
    mesh = Mesh.parse("dp=2 tp=2")
    atoms = ((8,), (6,))

    def code(text):
        return np.array([encode(Layout.parse(text, mesh), atoms)])

    for stored, grad, summed in [
        ("dp:R tp:R", "dp:P tp:S(0)", "dp:P tp:P"),
        ("dp:R tp:S(1)", "dp:P tp:P", "dp:P tp:S(1)"),
        ("dp:S(0) tp:R", "dp:P tp:R", "dp:S(0) tp:R"),
    ]:
        assert summed_gradients(code(stored), code(grad), 2) == code(summed)


def test_seconds_and_bytes_of_one_micro_batch_are_those_of_none():
    plain = CostModel(GRAPH, analyze(GRAPH), MACHINE, MESH)
    same = CostModel(
        *MicroBatchCounts(GRAPH, ANALYSIS).analyzed(1), MACHINE, MESH, Pricing(micro_batches=1)
    )
    for op in GRAPH.ops:
        for mine, theirs in zip(plain.operator(op), same.operator(op), strict=True):
            assert np.array_equal(mine, theirs)


def test_operators_take_longer_and_keep_less():
    plain = CostModel(GRAPH, analyze(GRAPH), MACHINE, MESH)
    model = CostModel(
        *MicroBatchCounts(GRAPH, ANALYSIS).analyzed(4), MACHINE, MESH, Pricing(micro_batches=4)
    )
    for op in model.graph.ops:
        one, four = plain.operator(op), model.operator(op)
        assert (four.seconds >= one.seconds * (1 - 1e-12)).all()
        assert four.bytes[0] * 4 == one.bytes[0]
    leaf = model.graph.leaves[1]
    codes = np.array([0])
    assert model.parameter(leaf, codes).seconds == plain.parameter(leaf, codes).seconds


def test_a_number_that_is_not_possible_is_left_out_and_noted():
    said = (
        f"{BATCH + 1} micro-batches are not possible: a batch of {BATCH} cannot be cut into"
        f" {BATCH + 1} micro-batches, none of them empty"
    )
    (plan, *_) = search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH], micro_batches=(1, BATCH + 1)))
    assert plan.micro_batches == 1
    assert plan.notes[0] == said
    with pytest.raises(MicroBatchError, match=f"^{said}; ask for other numbers"):
        search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH], micro_batches=(BATCH + 1,)))


def test_micro_batches_are_tried_where_a_limit_asks_for_them():
    asked = []

    def run(*, tight):
        asked.append(tight)
        counts = (1, 2) if tight else (1,)
        return search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH], micro_batches=counts))

    plain = if_tight(run, None)
    assert if_tight(run, plain[0].peak_bytes).smallest().micro_batches == 1
    assert asked == [False, False]
    good = max(
        i for i, (seconds, _) in enumerate(plain.costs) if seconds <= 1.02 * plain.costs[0][0]
    )
    needed = plain.settled(plain[good]).peak_bytes
    assert needed < plain.costs[good][1], "it adds up to more than it needs"
    assert if_tight(run, needed).smallest().micro_batches == 1
    assert asked.pop() is False
    less = plain.smallest().peak_bytes - 1
    with pytest.raises(InfeasibleError):
        plain.fastest(less)
    assert if_tight(run, less).fastest(less).micro_batches == 2
    assert asked[2:] == [False, True]


def test_memory_is_not_simulated_of_plans_that_are_far_too_large():
    def peak(_plan):
        raise AssertionError("the plan needs three quarters of its additive memory at least")

    def run(*, tight):
        found = search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH], micro_batches=(1,)))
        return found if tight else replace(found, simulation=FunctionSimulation(peak=peak))

    limit = min(most for _, most in run(tight=True).costs) // 2
    assert if_tight(run, limit).simulated_peak(run(tight=True)[-1]) > limit


def test_a_whole_frontier_goes_down_to_the_least_memory_where_memory_is_ample():
    plain = search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH]))
    whole = search(GRAPH, MACHINE, replace(PlanOptions.of(meshes=[MESH]), whole=True))
    assert {plan.micro_batches for plan in plain} == {1}
    assert whole.smallest().micro_batches > 1
    assert whole.smallest().peak_bytes < plain.smallest().peak_bytes
    assert whole[0].step_seconds == plain[0].step_seconds


def test_without_numbers_powers_of_two_are_tried_while_they_help():
    front = search(residual_layers(1), preset("2xH100"), PlanOptions.of(micro_batches="all"))
    counts = sorted({plan.micro_batches for plan in front})
    assert counts[:3] == [1, 2, 4]
    assert all(count & (count - 1) == 0 for count in counts)


def test_a_plan_file_keeps_micro_batches_and_one_without_has_one(frontier):
    plan = frontier.smallest()
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert any(t.times > 1 for t in plan.transfers)
    old = plan_to_json(search(GRAPH, MACHINE, PlanOptions.of(meshes=[MESH]))[0]).replace(
        '"micro_batches": 1,\n', ""
    )
    assert plan_from_json(old).micro_batches == 1
    assert f"in {plan.micro_batches} micro-batches" in str(plan)


def test_a_search_gathers_again_what_recomputed_layers_read(frontier):
    found = 0
    for plan in frontier:
        again = {value for op in plan.ops if op.runs_again for value in op.reads}
        gathered = {
            one.value
            for one in plan.transfers
            if one.phase is Phase.FORWARD and "all_gather dp" in one.collectives
        }
        for parameter in plan.parameters:
            if parameter.name in again & gathered:
                assert parameter.regathered
                found += 1
    assert found > 3
