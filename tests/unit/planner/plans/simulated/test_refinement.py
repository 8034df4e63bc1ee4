"""Depth of prefetch: as many buckets of parameters ahead as make a step faster within a limit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.strategy.strategy import Strategy
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.plans.simulated.refinement import DEPTHS, Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Backward, Wait
from shardwright.program.step.lower import plan_lowering
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.report.diff.difference import difference
from shardwright.report.text.explain import explain
from shardwright.rules.analysis import analyze
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import residual_layers


class Deep(nn.Module):
    """Wide layers, each in buckets of its own."""

    def __init__(self, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def subject():
    """The graph, a machine that hides most communication, and a function that settles plans."""
    with torch.device("meta"):
        graph = sw.capture(Deep(), (torch.empty(1536, 4096),))
    machine = replace(sw.Machine.preset("2x2xH100"), overlap=0.8)
    return graph, machine, Expansion(graph, machine, "adamw")


def refinement_of(subject, **changes):
    graph, machine, expansion = subject
    machine = replace(machine, **changes)
    return Refinement(graph, machine, "adamw", Footprints(on_cpu=False), expansion.sources.analysis)


def plan_of(subject, strategy):
    return subject[2].expanded(Strategy.parse(strategy)).plan(0.0, ())


def test_sharded_parameters_are_gathered_as_far_ahead_as_it_is_faster(subject):
    refinement, plan = refinement_of(subject), plan_of(subject, "dp_shard=4")
    one = refinement.settled(plan)
    found = refinement.settled(refinement.deepened(one, None))
    assert 1 < found.ahead <= DEPTHS[-1] and found.peak_bytes > one.peak_bytes
    assert found.step_seconds < one.step_seconds
    assert found.timeline.seconds == found.step_seconds
    assert found.lower_bound_seconds <= found.step_seconds
    assert f"parameters are gathered {found.ahead} buckets ahead" in sw.Plan.of(found).explain()
    assert "buckets ahead" not in sw.Plan.of(one).explain()
    (setting,) = difference(one, found).settings
    assert setting == ("buckets gathered ahead", "1", str(found.ahead))
    assert refinement.deepened(one, one.peak_bytes) is one, "there is no memory for another bucket"
    assert refinement.deepened(one, found.peak_bytes).ahead == found.ahead
    graph, machine, _ = subject
    assert sw.price(graph, machine, "dp_shard=4").ahead == found.ahead, "as in a frontier"


def test_plans_that_gain_nothing_are_left_as_they_are(subject):
    plan = plan_of(subject, "dp_replicate=4 zero=0")
    refinement = refinement_of(subject)
    one = refinement.settled(plan)
    assert refinement.deepened(one, None) is one
    refinement, plan = refinement_of(subject, overlap=0.0), plan_of(subject, "dp_shard=4")
    one = refinement.settled(plan)
    assert refinement.deepened(one, None) is one


def test_a_whole_plan_is_lowered_once_for_all_gathers_ahead(subject, monkeypatch):
    plan, refinement = plan_of(subject, "dp_shard=4"), refinement_of(subject)
    plain, lowered = plan_lowering.lower_step, []

    def counted(step):
        lowered.append(step.ahead)
        return plain(step)

    monkeypatch.setattr(plan_lowering, "lower_step", counted)
    one = refinement.compared(plan)
    assert one.timeline is not None and refinement.deepened(one, None).ahead == 2
    assert lowered == [1]


def test_the_memory_of_plans_that_gain_nothing_is_not_simulated(subject):
    plan, other = plan_of(subject, "dp_shard=4"), plan_of(subject, "dp_shard=4")
    refinement, second = (refinement_of(subject, overlap=0.5) for _ in range(2))
    assert refinement.deepened(refinement.compared(plan), None).ahead == 1
    found = refinement.simulated(plan)
    assert found[1].changes is not None
    ((ahead, deeper),) = [pair for pair in found.items() if pair[0] > 1]
    assert deeper.changes is None, "only its time is simulated"
    assert deeper.seconds == refinement.compared(replace(plan, ahead=ahead)).step_seconds
    second.learn(other, found)
    assert second.knows(other) and second.knows_seconds(replace(other, ahead=ahead))
    assert second.seconds(replace(other, ahead=ahead)) == deeper.seconds


def test_plans_that_are_compared_stay_the_same_objects_when_others_tell_of_them(subject):
    """They are known by identity, which another object may have once they are dropped."""
    plan, refinement = plan_of(subject, "dp_shard=4"), refinement_of(subject)
    one = refinement.compared(plan)
    refinement.learn(plan, refinement.simulated(plan))
    assert refinement.compared(plan) is one


def test_the_memory_of_a_copy_of_a_plan_is_not_simulated_again(subject, monkeypatch):
    plan, refinement = plan_of(subject, "dp_shard=4"), refinement_of(subject)
    peak = refinement.peak(plan)
    monkeypatch.setattr(Refinement, "_with_memory", None)
    monkeypatch.setattr(Refinement, "_peak_of_few_layers", None)
    assert refinement.peak(replace(plan, name="a copy")) == peak


def test_the_memory_of_most_buckets_ahead_is_not_simulated_where_fewer_are_taken(monkeypatch):
    monkeypatch.setattr("shardwright.planner.plans.simulated.refinement.DEPTHS", (2, 4))
    graph = residual_layers(28)
    machine = replace(sw.Machine.preset("2x2xH100"), overlap=0.9)
    expansion = Expansion(graph, machine, "adamw")
    plan = expansion.expanded(Strategy.parse("dp_shard=4 mb=2")).plan(0.0, ())
    tracer = Footprints(on_cpu=False)
    refinement = Refinement(graph, machine, "adamw", tracer, expansion.sources.analysis)
    assert refinement.deepened(refinement.compared(plan), None).ahead == 2
    found = refinement.simulated(plan)
    assert found[4].seconds < found[2].seconds, "faster, and by too little"
    assert found[4].changes is None, "only its time is simulated"


def test_what_is_reserved_follows_from_few_layers_only_where_memory_is_tight(monkeypatch):
    graph = residual_layers(12)
    found = {}
    for room in (1.1, 2.0):  # times the peak
        machine = sw.Machine.preset("4xH100")
        expansion = Expansion(graph, machine, "adamw")
        plan = expansion.expanded(Strategy.parse("dp_shard=4")).plan(0.0, ())
        given = "adamw", Footprints(on_cpu=False), expansion.sources.analysis
        peak = Refinement(graph, machine, *given).peak(plan)
        device = replace(machine.device, memory_bytes=int(room * peak), context_bytes=0)
        refinement = Refinement(graph, replace(machine, device=device), *given)
        reserved = refinement.reserved(refinement.compared(plan))
        settled = refinement.compared(plan).memory is not None
        memory = refinement.settled(plan).memory
        assert reserved == memory.reserved - memory.libraries
        found[room] = settled
    assert found == {1.1: False, 2.0: True}


def test_the_program_of_a_plan_gathers_as_the_plan_says(subject):
    graph, _, _ = subject
    plan, analysis = plan_of(subject, "dp_shard=4"), analyze(graph)

    def in_flight(ahead):
        """The most gathers before the first product that reads one."""
        read = sw.Plan.from_json(sw.Plan.of(replace(plan, ahead=ahead)).to_json())
        assert read.ahead == ahead
        text = str(step_program(graph, analysis, read_plan(read, graph, analysis), 0))
        return text.partition(" = forward")[0].count("all_gather")

    assert [in_flight(ahead) for ahead in (1, 2, 4)] == [2, 3, 5]


def test_plans_of_few_layers_differ_by_how_far_they_gather_ahead():
    """Few of twelve equal layers stand for all, in plans that differ in nothing else."""
    with torch.device("meta"):
        graph = sw.capture(Deep(12), (torch.empty(1024, 4096),))
    machine = replace(sw.Machine.preset("2x2xH100"), overlap=0.8)
    expansion = Expansion(graph, machine, "adamw")
    given = graph, machine, "adamw", Footprints(on_cpu=False), expansion.sources.analysis
    plan = expansion.expanded(Strategy.parse("dp_shard=4")).plan(0.0, ())
    folded, whole = Refinement(*given), Refinement(*given)
    for ahead in (2, 5):
        one = replace(plan, ahead=ahead)
        assert folded.compared(one).peak_bytes == whole.settled(one).peak_bytes


def test_sums_over_replicas_are_in_flight_while_layers_before_compute(subject):
    graph = subject[0]
    plan, analysis = plan_of(subject, "dp_replicate=2 dp_shard=2"), analyze(graph)
    program = step_program(graph, analysis, read_plan(plan, graph, analysis), 0)
    started: dict[str, int] = {}
    layers, beside = 0, []
    for one in program.instructions:
        layers += isinstance(one, Backward)
        if str(one).count("all_reduce(%grad"):
            started[one.handle] = layers
        elif isinstance(one, Wait) and one.handle in started:
            beside.append(layers - started[one.handle])
    assert len(beside) > 2 and all(beside[:-2]), "layers run between a start and its wait"


def test_a_plan_that_fits_says_if_the_allocator_would_hold_more_than_there_is(subject):
    _, machine, _ = subject
    plan = refinement_of(subject).settled(plan_of(subject, "dp_shard=4"))
    assert plan.memory is not None
    held = plan.memory.reserved - plan.memory.libraries
    notes = {}
    for has in (plan.peak_bytes - 1, plan.peak_bytes, held):
        context = machine.device.memory_bytes - machine.device.usable_bytes
        device = replace(machine.device, memory_bytes=has + context)
        assert device.usable_bytes == has
        found = refinement_of(subject, device=device).settled(plan_of(subject, "dp_shard=4"))
        notes[has] = [note for note in found.notes if "allocator would reserve" in note]
    assert [len(found) for found in notes.values()] == [0, 1, 0]


@pytest.mark.parametrize(
    "machine, strategy, optimizer, counts",
    [
        ("1xH100", "dp_shard=1", "adamw", (1,) * 12),  # 64 MiB each
        ("1xH100", "dp_shard=1 mb=2", "adamw", (1,) * 12),
        ("4xH100", "tp=4", "adamw_foreach", (4, 4, 4)),
        ("4xH100", "pp=2 tp=2 mb=2", "adamw_foreach", (2, 2, 2, 1)),
        ("4xH100", "dp_shard=4", "adamw_foreach", ()),  # gathered copies are the peak
        ("4xH100", "tp=4", "adamw", (4, 4, 4)),  # on CUDA a foreach update of tiles
        ("4xH100", "tp=4", "adamw_loop", ()),
        ("1xH100", "dp_shard=1", "adamw_fused", ()),
        ("1xH100", "dp_shard=1", "muon", ()),
    ],
)
def test_an_update_that_is_the_peak_is_in_groups(machine, strategy, optimizer, counts):
    with torch.device("meta"):
        graph = sw.capture(Deep(12), (torch.empty(16, 4096),))
    expansion = Expansion(graph, sw.Machine.preset(machine), optimizer)
    analysis, machine = expansion.sources.analysis, expansion.machine
    plan = expansion.expanded(Strategy.parse(strategy)).plan(0.0, ())
    tracer = Footprints(on_cpu=False)
    refinement = Refinement(graph, machine, optimizer, tracer, analysis)
    compared = refinement.compared(plan)
    found = refinement.settled(plan)
    assert compared.peak_bytes == found.peak_bytes
    (*_, update) = step_program(graph, analysis, read_plan(found, graph, analysis), 0).instructions
    assert update.groups == counts
    at_once = refinement.settled(replace(plan, update_group_bytes=0))
    assert (at_once.peak_bytes > found.peak_bytes) == bool(counts)
    launches = max(0, len(counts) - 1) * 8 * machine.device.launch_seconds
    assert found.step_seconds - at_once.step_seconds == pytest.approx(launches)
    assert plan_from_json(plan_to_json(found)).update_group_bytes == found.update_group_bytes
    assert ("of parameters at a time" in explain(found)) == bool(counts)
