"""Copies to and from the host: what is offloaded, when copies run, and what is refused."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.ir.graph import VerifyError
from shardwright.ir.plan import PlanError
from shardwright.planner.recost import recosted
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.host_copies import Fetch, Offload
from shardwright.program.step.instructions import Forward, Wait
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.program.step.order import check_order
from shardwright.program.step.program_json import program_from_json, program_to_json
from shardwright.program.step.verify import verify
from shardwright.report.program_text import program_summary
from shardwright.rules.analysis import analyze
from shardwright.simulate.time.program_prices import host_copy_seconds
from tests.ranks.test_offload import OFFLOAD, subject


@pytest.fixture(scope="module")
def graph():
    model, batch = subject(0.0)
    return sw.capture(model, (), batch)


@pytest.fixture(scope="module")
def programs(graph):
    plan = sw.price(graph, "2xcpu", "dp_shard=2 ac=full" + OFFLOAD)
    analysis = analyze(graph)
    decisions = read_plan(plan, graph, analysis)
    return [step_program(graph, analysis, decisions, rank) for rank in range(2)]


def test_the_inputs_of_all_layers_but_the_last_go_to_the_host(programs):
    instructions = programs[0].instructions
    out = [one for one in instructions if isinstance(one, Offload)]
    back = [one for one in instructions if isinstance(one, Fetch)]
    assert [one.shape for one in out] == [(768, 32)] * 7  # of eight blocks
    assert [one.value for one in back] == [one.result for one in out[::-1]]
    again = [one.inputs for one in instructions if isinstance(one, Forward) and one.again]
    assert all(any(one.result in inputs for inputs in again) for one in back)
    assert all(not any(one.value in inputs for inputs in again) for one in out)


def test_copies_run_while_other_layers_do(programs):
    """Each value is waited for behind its own layer, and its copy back starts early enough."""
    instructions = programs[0].instructions
    places = {one: at for at, one in enumerate(instructions)}
    waits = {one.handle: at for one, at in places.items() if isinstance(one, Wait)}
    computed = [at for one, at in places.items() if isinstance(one, Forward)]
    for one in programs[0].host_copies():
        start, end = places[one], waits[one.handle]
        assert sum(start < at < end for at in computed) >= 1
    fetched = [one for one in instructions if isinstance(one, Fetch)]
    in_flight = [
        sum(places[one] < at < waits[one.handle] for one in fetched)
        for at in range(len(instructions))
    ]
    assert max(in_flight) == 1


def test_programs_come_back_from_text_and_a_missing_copy_is_found(programs):
    check_order(programs)
    assert program_from_json(program_to_json(programs[0])) == programs[0]
    fetch = next(one for one in programs[0].host_copies() if isinstance(one, Fetch))
    assert f"{fetch.handle} = fetch(%{fetch.value}: float64[768, 32])" in str(programs[0])
    summary = program_summary(programs[0])
    assert "7 copies to host (1.31 MiB), 7 copies from host (1.31 MiB)" in summary
    kept = tuple(one for one in programs[0].instructions if one is not fetch)
    broken = replace(programs[0], instructions=kept)
    with pytest.raises(VerifyError, match=f"{fetch.handle} is not in flight"):
        verify(broken)
    with pytest.raises(VerifyError, match=f"rank 0 waits for {fetch.handle} too early"):
        check_order([broken, programs[1]])
    without_wait = tuple(
        one for one in kept if not (isinstance(one, Wait) and one.handle == fetch.handle)
    )
    with pytest.raises(VerifyError, match="before it is defined"):
        verify(replace(programs[0], instructions=without_wait))


def test_the_price_has_the_copies_that_nothing_hides(graph, programs):
    cpu = sw.Machine.preset("1xcpu")
    kept = sw.price(graph, cpu, "ac=full")
    offloaded = sw.price(graph, cpu, "ac=full" + OFFLOAD)
    # Of twice the rows; the processor that computes copies, too.
    copies = [replace(one, shape=(1536, 32)) for one in programs[0].host_copies()]
    seconds = sum(host_copy_seconds(one, cpu) for one in copies)
    assert offloaded.step_seconds == pytest.approx(kept.step_seconds + seconds, rel=1e-9)
    for rate, hidden in (("100TB/s", True), ("1MB/s", False)):
        gpu = sw.Machine.preset("2xH100").with_(host_bandwidth=rate)
        kept, offloaded = (sw.price(graph, gpu, f"dp_shard=2 ac=full{e}") for e in ("", OFFLOAD))
        assert offloaded.peak_bytes < kept.peak_bytes
        assert (offloaded.step_seconds == pytest.approx(kept.step_seconds)) is hidden
    # Each direction copies all values one after the other.
    assert offloaded.step_seconds > 2 * offloaded.memory.host / 1e6


def test_plans_say_what_is_offloaded(graph):
    plan = sw.price(graph, "2xcpu", "dp_shard=2 ac=full" + OFFLOAD)
    assert (
        "recompute 40 of 52 operators · offload activations 1.31 MiB to the host" in plan.explain()
    )
    assert "offloaded values take 1.31 MiB of the memory of the host" in plan.explain()
    read = sw.Plan.from_json(plan.to_json())
    assert read == plan and read.offload == ("activations",)
    small = sw.Machine.preset("2xcpu").with_(host_memory="1MB")
    saves, note = sw.price(graph, small, plan.name).notes
    assert saves.startswith("offload saves 10") and saves.endswith(" ms of the step")
    assert note.startswith("offloaded values take")


@pytest.mark.parametrize(
    "strategy, figures, text",
    [
        ("dp_shard=2 offload=activations", {}, "so add ac=full"),
        ("pp=2 mb=2 offload=optimizer,parameters", {}, "so use offload=optimizer or pp=1"),
        ("dp_shard=2 ac=full offload=activations", None, "the machine has no host_bandwidth"),
    ],
)
def test_what_is_not_offloaded_is_refused_in_a_line(graph, strategy, figures, text):
    machine = sw.Machine.preset("2xcpu")
    if figures is None:
        machine = replace(machine, device=replace(machine.device, host_bytes_per_s=None))
    with pytest.raises(ValueError, match=text):
        sw.price(graph, machine, strategy)


def test_plans_that_cannot_be_run_or_priced_again_are_refused(graph):
    plan = sw.price(graph, "2xcpu", "dp_shard=2 ac=full" + OFFLOAD)
    machine = sw.Machine.preset("2xcpu")
    again = recosted(plan, graph, machine, "adamw", sw.strategies(graph, machine))
    assert (again.step_seconds, again.memory.host) == (plan.step_seconds, plan.memory.host)
    alone = replace(machine, device=replace(machine.device, host_bytes_per_s=None))
    with pytest.raises(PlanError, match="2xcpu has no host_bandwidth; give it"):
        recosted(plan, graph, alone, "adamw", sw.strategies(graph, machine))
