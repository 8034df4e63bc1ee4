"""Names of schedules and collectives that nobody knows.

They were taken for others: a schedule for an interleaved one, a collective for an all-to-all.
"""

from types import SimpleNamespace

import pytest
import torch

from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline, PipelineError
from shardwright.machine.presets import preset
from shardwright.machine.topology import links
from shardwright.runtime.comm.collectives import collected
from shardwright.simulate.costs.collectives import step_price
from shardwright.simulate.time.pipeline_schedules import orders


def test_a_schedule_that_is_not_known_is_an_error():
    with pytest.raises(PipelineError, match="'1F2B' is none of GPipe"):
        Pipeline(("a",), "1F2B", 2)
    with pytest.raises(PipelineError, match="'1F2B' is none of GPipe"):
        orders("1F2B", 2, 2, 4)


def test_a_collective_that_is_not_known_is_an_error():
    group = SimpleNamespace(get_group=lambda: None)
    with pytest.raises(ValueError, match="no collective"):
        collected(torch.ones(2), SimpleNamespace(collective="broadcast"), group)
    machine = preset("2xcpu")
    link = links(machine, Mesh.parse("dp=2"))[0]
    with pytest.raises(ValueError, match="no collective"):
        step_price("broadcast", link, machine)
