"""What a GPU showed, or a reading of the code for GPUs, where a CPU can show it too.

`scripts/gpu_check` has the rest: it found that asynchronous pipelines of three stages wait for each
other for ever over NCCL, that a batch on the CPU was refused, and that torch 2.11 cannot import
what torch 2.13 can.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.runtime.async_pipeline.runner import async_pipeline
from shardwright.runtime.comm.channel import Channel
from shardwright.runtime.pipeline.stage_links import StageLinks
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().sum()


def batch():
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)),)


def test_collectives_of_a_mesh_fail_after_the_timeout_of_the_run(monkeypatch):
    """They had the default of their backend, ten minutes or half an hour, whatever was given."""
    plan = sw.price(sw.capture(Net(), batch()), "1xcpu", "mb=1", "sgd")
    parallel = sw.parallelize(Net(), plan)
    asked = []
    groups = [SimpleNamespace(set_timeout=asked.append) for _ in range(2)]
    monkeypatch.setattr(parallel, "_sw_groups", groups)
    parallel.set_timeout(timedelta(seconds=7))
    assert asked == [timedelta(seconds=7)] * 2
    assert callable(dist.ProcessGroup.set_timeout)


def test_each_channel_of_an_asynchronous_pipeline_has_a_group_of_two():
    """Under NCCL a send waited for the receive that was posted before it in the same group."""
    for groups in run_ranks(3, _groups):
        assert all(size == 2 for size, _ in groups)
        assert len({name for _, name in groups}) == len(groups)


def _groups():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Net())
    pipeline = async_pipeline(model, batch())
    links: StageLinks = pipeline._sw_link
    channels = [links.values_in, links.values_out, links.gradients_in, links.gradients_out]
    groups = [one.group for one in channels if isinstance(one, Channel)]
    return [(group.size(), group.group_name) for group in groups]
