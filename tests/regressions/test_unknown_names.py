"""Names of schedules and collectives that nobody knows.

They were taken for others: a schedule for an interleaved one, a collective for an all-to-all. In a
plan file a collective of any name was read, and shown as one that moves data.
"""

from types import SimpleNamespace

import pytest
import torch

from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.plan import PlanError
from shardwright.ir.schedules.registry import orders
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.presets import preset
from shardwright.machine.topology import links
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.runtime.comm import collectives
from shardwright.runtime.comm.collectives import collected
from shardwright.simulate.costs.collectives import step_price
from tests.harness.plans import transformer


def test_a_schedule_that_is_not_known_is_an_error():
    with pytest.raises(PipelineError, match="'1F2B' is none of GPipe"):
        Pipeline(("a",), "1F2B", 2)
    with pytest.raises(PipelineError, match="'1F2B' is none of GPipe"):
        orders("1F2B", 2, 2, 4)


def test_a_collective_that_is_not_known_is_an_error(monkeypatch):
    monkeypatch.setattr(collectives, "backend_of", lambda _group: None)
    pair = SimpleNamespace(size=lambda: 2)
    group = SimpleNamespace(get_group=lambda: pair, get_local_rank=lambda: 0)
    with pytest.raises(ValueError, match="no communication"):
        collected(torch.ones(2), SimpleNamespace(collective="broadcast"), group)
    machine = preset("2xcpu")
    link = links(machine, Mesh.parse("dp=2"))[0]
    with pytest.raises(ValueError, match="no communication"):
        step_price("broadcast", link, machine)


def test_a_plan_file_with_a_collective_that_is_not_known_is_refused():
    text = plan_to_json(transformer())
    assert "all_reduce tp" in text and plan_from_json(text)
    with pytest.raises(PlanError, match="'broadcast' is no collective"):
        plan_from_json(text.replace("all_reduce tp", "broadcast tp"))
