"""What a GPU showed, or a reading of the code for GPUs, where a CPU can show it too.

`scripts/gpu_check` has the rest: it found that asynchronous pipelines of three stages wait for each
other for ever over NCCL, that a batch on the CPU was refused, and that torch 2.11 cannot import
what torch 2.13 can.
"""

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from scripts.gpu_check.exact import errors_of
from shardwright.machine.backends import BACKENDS
from shardwright.runtime import train_module
from shardwright.runtime.async_pipeline.runner import async_pipeline
from shardwright.runtime.backend import base
from shardwright.runtime.backend.registry import backend_for
from shardwright.runtime.comm.channel import Channel
from shardwright.runtime.comm.shutdown import leave
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
    apart = SimpleNamespace(set_timeout=asked.append)
    monkeypatch.setattr(parallel, "_sw_channels", {"dp": groups[0], "dp:gathers": apart})
    monkeypatch.setattr(train_module, "backend_of", lambda _: backend_for("cuda"))
    parallel.set_timeout(timedelta(seconds=7))
    assert asked == [timedelta(seconds=7)] * 3
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


def test_a_rank_that_failed_ends_though_its_interpreter_waits():
    """Destroying NCCL's groups waits for collectives that the other ranks never start."""
    script = (
        "import atexit, sys, threading\n"
        "from shardwright.runtime.comm.shutdown import end_within\n"
        "atexit.register(threading.Event().wait)\n"
        "end_within(0.5, 3)\n"
        "sys.exit('what went wrong')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 3
    assert done.stderr == "what went wrong\n"


def test_a_failed_rank_does_not_destroy_groups_that_wait_for_others(monkeypatch):
    destroyed = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    for name, expected in (("nccl", []), ("gloo", [True])):
        monkeypatch.setattr(dist, "get_backend", lambda _group=None, name=name: name)
        leave(failed=True)
        assert destroyed == expected


def test_the_check_on_a_gpu_tells_of_gradients_that_are_no_numbers():
    """`max` passed over NaN, so that the check would have."""
    loss, gradient = torch.ones(()), torch.tensor([1.0, 2.0])
    broken = torch.tensor([1.0, float("nan")])
    assert errors_of(loss, {"w": gradient}, loss, {"w": gradient}) == 0
    assert errors_of(loss, {"w": broken}, loss, {"w": gradient}) == float("inf")
    assert errors_of(loss * float("nan"), {"w": gradient}, loss, {"w": gradient}) == float("inf")


def test_complex_sums_are_scattered(monkeypatch):
    """Torch sends complex numbers as pairs in every other collective, and refuses them here."""
    begun = mock.Mock()
    monkeypatch.setattr(base, "reduce_scatter_single", begun)
    own, given = torch.zeros(3, dtype=torch.complex64), torch.ones(6, dtype=torch.complex64)
    base.Backend(BACKENDS["nccl"]).begin_reduce_scatter(mock.Mock(), own, given, 0)
    ((real, pairs), _) = begun.call_args
    assert (pairs.dtype, pairs.shape) == (torch.float32, (6, 2))
    real[:, 1] = 2.0
    assert own.tolist() == [2j] * 3
