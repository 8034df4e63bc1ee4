"""Laws that no machine breaks: links, devices and one device alone."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.api import search_with as search
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.timeline import Stream
from shardwright.machine.presets import preset
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(3)


def slowed(machine, factor, latency):
    levels = tuple(
        replace(
            level,
            bytes_per_s=level.bytes_per_s / factor,
            latency_seconds=level.latency_seconds + latency,
        )
        for level in machine.levels
    )
    return replace(machine, levels=levels)


@settings(max_examples=4)
@given(st.sampled_from([1.0, 3.0, 50.0]), st.sampled_from([0.0, 1e-3]), st.sampled_from([0.0, 0.7]))
def test_a_slower_link_speeds_no_plan_up(factor, latency, overlap):
    fast = replace(preset("4xH100"), overlap=overlap)
    before, after = (search(GRAPH, m) for m in (fast, slowed(fast, factor, latency)))
    known = {(plan.name, plan.mesh): plan for plan in before.baselines}
    for plan in after.baselines:
        same = known.get((plan.name, plan.mesh))
        if same is not None:
            assert plan.step_seconds >= same.step_seconds * (1 - 1e-9)
            assert plan.peak_bytes == same.peak_bytes
    assert after[0].step_seconds >= before[0].lower_bound_seconds * (1 - 1e-9)


def test_more_devices_never_raise_the_memory_of_the_smallest_plan():
    peaks = [
        search(GRAPH, preset(f"{devices}xH100")).smallest().peak_bytes for devices in (1, 2, 4, 8)
    ]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("machine", ["1xH100", "1xcpu"])
def test_one_device_takes_the_serial_sum_and_sends_nothing(machine):
    front = search(GRAPH, preset(machine), PlanOptions.of(recompute=False))
    plan = front.settled(front[0])
    assert plan.transfers == ()
    serial = sum(op.seconds for op in plan.ops) + sum(p.seconds for p in plan.parameters)
    assert plan.step_seconds == pytest.approx(serial, rel=1e-12)
    assert plan.lower_bound_seconds == pytest.approx(serial, rel=1e-12)
    found = plan.timeline
    assert found.seconds == pytest.approx(serial, rel=1e-12)
    assert {task.track.stream for task in found.tasks} == {Stream.COMPUTE}
