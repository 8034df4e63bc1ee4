"""`parallelize` changed how the host ran the process of whoever used it, without being asked.

Gloo's threads became `SCHED_BATCH`, malloc kept all that was freed until the process ended, and
waits for collectives span for up to 10 ms. All of it was fitted to ranks of one host with two cores
and is left alone now unless `tune_host=True` asks for it.
"""

import ctypes
import os
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.harness.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the host is tuned on Linux only"),
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x).square().mean()


def host():
    """How this process is run, as far as one can ask."""
    kinds = {}
    for task in Path("/proc/self/task").glob("*"):
        name = (task / "comm").read_text().strip()
        kinds.setdefault(name, set()).add(os.sched_getscheduler(int(task.name)))
    gloo = set().union(*(kind for name, kind in kinds.items() if "gloo" in name))
    every = set().union(*kinds.values())
    return {
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "schedulers": sorted(every),
        "of gloo": sorted(gloo),
        "cores": sorted(os.sched_getaffinity(0)),
    }


def trained(late, while_waiting=None, **options):
    """The host after a step to which rank 1 is `late`, calls of `mallopt`, and yields.

    Each yield calls `while_waiting`.
    """
    libc, environment = mock.Mock(), dict(os.environ)
    libc.mallopt.return_value = 1
    batch = {"x": torch.ones(4, 8)}
    with (
        mock.patch.object(ctypes, "CDLL", return_value=libc),
        mock.patch.object(os, "sched_yield", side_effect=while_waiting) as yields,
    ):
        model = Model()
        plan = sw.plan(
            model,
            kwargs=batch,
            machine="2xcpu",
            constraints=["mesh dp=2", "forbid up=*:whole"],
        )
        module = sw.parallelize(model, plan, **options)
        optimizer = torch.optim.SGD(module.parameters())
        module.train_step(optimizer, batch)  # the first call makes what later calls need
        if dist.get_rank():
            late()
        module.train_step(optimizer, batch)
    assert dict(os.environ) == environment
    return host(), libc.mallopt.call_count, yields.call_count


def left_alone_and_tuned(folder):
    before = host()
    left_alone = trained(lambda: time.sleep(0.3))
    store = dist.FileStore(f"{folder}/store", 2)
    tuned = trained(
        lambda: store.wait(["rank 0 yields"], timedelta(seconds=60)),
        while_waiting=lambda: store.set(f"rank {dist.get_rank()} yields", "yes"),
        tune_host=True,
    )
    return before, left_alone, tuned


def test_the_host_is_left_alone_unless_it_is_to_be_tuned(tmp_path):
    of_ranks = run_ranks(2, left_alone_and_tuned, tmp_path)
    for before, (after, mallopts, yields), (tuned, tuned_mallopts, _) in of_ranks:
        assert after == before
        assert after["of gloo"] == [os.SCHED_OTHER]
        assert (mallopts, yields) == (0, 0)
        assert tuned["of gloo"] == [os.SCHED_BATCH]
        assert tuned["priority"] == before["priority"]
        assert tuned_mallopts > 0
    assert of_ranks[0][2][2] > 0  # rank 0 spins until rank 1 arrives
