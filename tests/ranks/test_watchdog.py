"""A run that does not go on names the rank that holds it up, and where the others wait."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.train.coordination.watchdog import STALLED, Watchdog, report
from tests.harness.ranks import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def slow_data(until):
    while not until.wait(0.01):
        time.sleep(0.01)


def stalls(text, folder):
    """Rank 1 is busy with its data, rank 0 waits: in the step, for all ranks, then in a start."""
    rank = dist.get_rank()
    module = sw.parallelize(Net(), sw.Plan.from_json(text))
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(1)),)
    module.forward_backward(batch)
    told = []
    waits = [lambda: module.forward_backward(batch), dist.barrier, dist.new_group]
    for number, wait in enumerate(waits):
        ended, said, seconds = threading.Event(), [], 3.0
        store = dist.FileStore(f"{folder}/{number}", 2)

        def end(status, ended=ended):
            assert status == STALLED
            ended.set()

        starts = wait is dist.new_group
        limits = (60.0, seconds) if starts else (seconds, 60.0)
        watchdog = Watchdog(lambda store=store: store, rank, 2, *limits, said.append, end)
        if not starts:
            watchdog.beat(6)
        if rank == 1:
            slow_data(ended)
        wait()
        ended.wait(60)
        watchdog.close()
        told.append(said)
        dist.barrier()
    quick = Watchdog(lambda: None, rank, 2, 5.0, 5.0, told.append, told.append)
    for step in range(4):
        quick.beat(step)
    quick.close()
    return told


@pytest.mark.ranks
def test_the_rank_that_holds_others_up_is_named(tmp_path):
    graph = sw.capture(Net(), (torch.randn(8, 6),))
    named = {p.name: p for p in sw.search(graph, sw.Machine.preset("2xcpu")).baselines}
    text = plan_to_json(named["fully sharded"])
    of_ranks = run_ranks(2, stalls, text, str(tmp_path))
    (step,), (barrier,), (start,) = (one + other for one, other in zip(*of_ranks, strict=True))
    assert "no step was done for 3 s, in step 7; held up by rank 1, which is in slow_data" in step
    assert "test_watchdog.py:" in step
    assert "; rank 0 waits for t1 = all_gather(%up.weight, %" in step, step
    assert "; rank 0 waits in barrier" in barrier
    assert start.startswith("the start did not go on for 3 s; held up by rank 1, which is in slow_")
    assert "; rank 0 waits in new_group" in start


def test_who_is_to_blame():
    waits = {"step": 4, "waits": True, "text": "waits in barrier"}
    said = report({0: waits, 2: waits}, 4, 60)
    assert "held up by rank 1, 3, which does not answer; rank 0, 2 waits in barrier" in said
    said = report({0: waits, 1: {**waits, "step": 3}}, 2, 60)
    assert "in step 4; held up by rank 1, behind the others" in said
    other = {**waits, "text": "waits in broadcast"}
    assert "all ranks wait, for different things" in report({0: waits, 1: other}, 2, 60)
    said = report({0: waits, 1: waits}, 2, 60)
    assert "; all ranks wait for each other; rank 0, 1 waits in barrier" in said


def test_a_store_that_is_gone_is_told():
    ended, said = threading.Event(), []

    def gone():
        raise dist.DistStoreError("connection refused")

    def slow():
        watchdog = Watchdog(gone, 1, 2, 0.1, 60.0, said.append, lambda status: ended.set())
        time.sleep(0.3)
        assert not said
        watchdog.beat(0)
        slow_data(ended)
        watchdog.close()

    slow()
    assert said[0].startswith("rank 1 is in slow_data (test_watchdog.py:")
    assert "the store that all ranks share does not answer (connection refused)" in said[0]
