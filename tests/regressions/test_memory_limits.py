"""Plans that the devices cannot hold, and two answers to one question.

A user asked a frontier for its fastest plan, without a limit, and was given one of 93 GiB for
devices of 80 GB. Another was told by `frontier` that nothing fits, 204 GiB at least, where `plan`
found a plan of 73 GiB: only `plan` tried micro-batches, and only `plan` followed the memory of its
plans tensor by tensor.

Now the memory of a device is the limit where none is given, everywhere; a plan that exceeds it is
given to those who ask for "unlimited", and says so. Micro-batches are tried by the same rule in
every search, and what `frontier` shows is settled.
"""

from dataclasses import replace

import pytest

from shardwright.api import search_with as search
from shardwright.ir.frontier import Frontier, InfeasibleError
from shardwright.ir.layout import Bytes
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.report.choice import none_fits
from shardwright.report.text.explain import explain
from tests.harness.layered_graphs import residual_layers

BIG = preset("2xH100")


def holding(count):
    """Two devices that have so many bytes for tensors."""
    device = BIG.device
    return replace(BIG, device=replace(device, memory_bytes=Bytes(count + device.context_bytes)))


@pytest.fixture(scope="module")
def graph():
    return residual_layers(2)


@pytest.fixture(scope="module")
def roomy(graph):
    return search(graph, BIG)


def within(frontier: Frontier, count: int) -> Frontier:
    return replace(frontier, device_bytes=Bytes(count))


def test_without_a_limit_the_plan_fits_a_device(roomy):
    fastest = roomy.fastest("unlimited")
    tight = within(roomy, fastest.peak_bytes - 1)
    plan = tight.fastest()
    assert plan.peak_bytes < fastest.peak_bytes
    assert not any("exceeds" in note for note in plan.notes)


def test_a_plan_past_the_memory_is_asked_for_and_says_so(roomy):
    tight = within(roomy, roomy.smallest().peak_bytes - 1)
    for ask in (tight.fastest, tight.smallest):
        with pytest.raises(InfeasibleError, match=r"the memory of a device; .*'unlimited'"):
            ask()
        plan = ask("unlimited")
        assert plan.notes[0].startswith("exceeds the device memory: it needs")
        assert "exceeds the device memory" in explain(plan)


def test_the_error_names_the_least_memory_found(roomy):
    least = roomy.smallest().peak_bytes
    with pytest.raises(InfeasibleError) as raised:
        within(roomy, 1).fastest()
    assert raised.value.smallest_bytes == least


def test_every_search_tries_micro_batches_where_the_devices_are_too_small(graph):
    one = search(graph, BIG, PlanOptions.of(micro_batches=(1,))).smallest().peak_bytes
    tight = search(graph, holding(one - 1))
    assert tight.fastest().micro_batches > 1
    assert {plan.micro_batches for plan in search(graph, BIG)} == {1}


def test_all_that_is_shown_is_settled(roomy):
    shown = roomy.all_settled()
    every = [*shown, *shown.baselines]
    assert all(plan.memory is not None and plan.memory.peak == plan.peak_bytes for plan in every)
    assert shown.all_settled() == shown


def test_that_none_fits_is_said_with_the_least(roomy):
    shown = within(roomy, 1).all_settled()
    assert none_fits(shown).startswith("none fits: of all plans for 2 devices of 2xH100")
    assert none_fits(roomy.all_settled()) == ""
