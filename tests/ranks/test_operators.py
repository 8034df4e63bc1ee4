"""Operators timed on two ranks, as plans have them."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch

from shardwright.ir.graph import Ref
from shardwright.machine.calls import OpCall, OperandSpec
from shardwright.machine.measurement import Measured
from shardwright.machine.presets import preset
from shardwright.profile import op_timings
from shardwright.profile.local_ranks import silent
from shardwright.profile.op_timings import with_cached_timings, with_timings
from shardwright.profile.timing_cache import TimingCache


def linear(rows, trained=True):
    given = (OperandSpec((rows, 64), "float32", trained), OperandSpec((32, 64), "float32", trained))
    return OpCall("aten.linear.default", (Ref("0"), Ref("1")), (), given)


EMBEDDING = OpCall(
    "aten.embedding.default",
    (Ref("0"), Ref("1")),
    (),
    (OperandSpec((8, 4), "float32", True), OperandSpec((3, 5), "int64", False)),
)
LSTM = OpCall(
    "aten.lstm.input",
    (
        Ref("0"),
        (Ref("1"), Ref("2")),
        (Ref("3"), Ref("4"), Ref("5"), Ref("6")),
        True, 1, 0.0, True, False, True,
    ),
    (),
    (
        OperandSpec((2, 3, 4), "float32", True),
        *(OperandSpec((1, 2, 5), "float32", False) for _ in range(2)),
        *(OperandSpec(shape, "float32", True) for shape in ((20, 4), (20, 5), (20,), (20,))),
    ),
)  # fmt: skip
ODD = OpCall("aten.view.default", (Ref("0"), (7,)), (), (OperandSpec((4, 2), "float32", True),))


@pytest.mark.ranks
def test_calls_are_timed_once_and_remembered(tmp_path, monkeypatch):
    known = TimingCache(tmp_path / "operators.sqlite", pytest.fail)
    machine = preset("2xcpu")
    calls = [linear(4096), linear(64), linear(4096, trained=False), EMBEDDING, LSTM, ODD]
    found = with_timings(machine, calls, 0.5, known, silent)
    times = {timing.call: timing for timing in found.device.timings}
    assert times.keys() == {str(call) for call in calls} - {str(ODD)}
    assert all(timing.forward > 0 for timing in times.values())
    large, small = times[str(linear(4096))], times[str(linear(64))]
    assert large.forward > 2 * small.forward and large.backward > 2 * small.backward
    assert times[str(linear(4096, trained=False))].backward < large.backward / 4
    assert times[str(LSTM)].backward > 0

    monkeypatch.setattr(op_timings, "measure_calls", None)  # nothing is measured any more
    assert with_timings(found, calls, 0.5, known, silent) is found
    assert with_cached_timings(machine, known) == found


def test_a_backward_pass_finds_nothing_of_its_forward_pass_in_the_caches():
    """Others run between the two, as in a step."""
    runs = op_timings._CallRuns(linear(64), torch.device("cpu"))
    before = [made[0] for made, _ in runs._kept]
    assert len(before) > 2 and len({one.data_ptr() for one in before}) == len(before)
    weight, other = runs.backward()[1], runs.backward()[1]
    assert weight.shape == (32, 64) and not torch.equal(weight, torch.zeros(()))
    assert torch.equal(weight, other)  # of other tensors of equal values
    assert [made[0] for made, _ in runs._kept] == before[2:]
    runs.ahead()
    assert runs._kept[-1][0][0].data_ptr() not in {one.data_ptr() for one in before[2:]}


def test_timings_hold_for_so_many_ranks_and_threads(monkeypatch):
    machine = preset("2xcpu")
    two, four = op_timings.device_key(machine), op_timings.device_key(preset("4xcpu"))
    assert two != four and f"torch {torch.__version__}" in two
    tuned = Measured(datetime.now(UTC), 0.0, tuned_host=True)
    assert op_timings.device_key(replace(machine, measured=tuned)) not in (two, four)
    monkeypatch.setattr(op_timings, "threads_of", lambda devices: 7)
    assert "2 ranks of 7 threads" in op_timings.device_key(machine)
