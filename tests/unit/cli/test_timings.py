"""Plans for this host are made again with what their operators take."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.cli.timings import Choice, choose_with_timings
from shardwright.machine.calls import Timing
from shardwright.machine.measurement import Measured
from shardwright.machine.presets import preset
from shardwright.profile import op_timings

MACHINE = replace(preset("2xcpu"), measured=Measured(datetime.now(UTC), 0.0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)

    def forward(self, x):
        return self.up(x).square().mean()


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The calls that were to be measured; each takes a millisecond both ways."""
    calls = []

    def measured(machine, new, seconds, tell):
        assert machine.devices == 2 and 0 < seconds <= 5.0
        tell("operators", 0.5)
        calls.append([str(call) for call in new])
        return {str(call): Timing(str(call), 1e-3, 1e-3) for call in new}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(op_timings, "measure_calls", measured)
    return calls


def test_operators_that_are_not_remembered_are_timed_and_plans_made_again(asked, capsys):
    graph = sw.capture(Model(), (torch.randn(16, 64),))

    def choose(machine):
        frontier = sw.search(graph, machine)
        return Choice(frontier.fastest(), frontier)

    plan = choose_with_timings(graph, MACHINE, 5.0, choose).plan
    assert any(call.startswith("aten.linear.default") for call in asked[0])
    every = [call for calls in asked for call in calls]
    assert len(set(every)) == len(every)
    (linear,) = [op for op in plan.ops if op.target == "aten.linear.default"]
    assert linear.seconds == pytest.approx(2e-3)
    said = capsys.readouterr()
    assert said.out == ""
    assert f"timed {len(asked[0])} operators of these plans on this host" in said.err
    assert "operators.sqlite" in said.err and "--time-operators 0 goes without" in said.err

    times = len(asked)
    again = choose_with_timings(graph, MACHINE, 5.0, choose).plan
    assert len(asked) == times and capsys.readouterr().err == ""
    assert again.step_seconds == plan.step_seconds
