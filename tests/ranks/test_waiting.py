"""Sums and exchanges in place over a process group, with what they make of every rank's."""

import torch

from shardwright.runtime.backend.registry import backend_of
from tests.harness.ranks import run_ranks


def results():
    import torch.distributed as dist

    group, rank = dist.group.WORLD, dist.get_rank()
    summed, largest = torch.arange(3.0) + rank, torch.tensor([rank, -rank])
    backend = backend_of(group)
    later = torch.full((2,), rank + 1.0)
    work = backend.begin_reduce(group, later)
    backend.reduce(group, summed)
    backend.reduce(group, largest, dist.ReduceOp.MAX)
    work.wait()
    large = torch.ones(2**21 + 1) + rank
    assert isinstance(work, dist.Work)
    backend.tune_host()
    asleep, awake = backend.begin_reduce(group, large), backend.begin_reduce(group, torch.ones(2))
    assert isinstance(asleep, dist.Work) and not isinstance(awake, dist.Work)
    asleep.wait()
    awake.wait()
    assert (large == 3).all()
    rows = torch.arange(4.0).view(4, 1) + 10 * rank
    counts = [[1, 3], [2, 2]]  # rows of each rank to each
    found = torch.empty(sum(row[rank] for row in counts), 1)
    backend.exchange(group, found, rows, [row[rank] for row in counts], counts[rank])
    return summed.tolist(), largest.tolist(), later.tolist(), found.flatten().tolist()


def test_sums_and_exchanges():
    summed, largest, later = [1.0, 3.0, 5.0], [1, 0], [3.0, 3.0]
    assert run_ranks(2, results) == [
        (summed, largest, later, [0.0, 10.0, 11.0]),
        (summed, largest, later, [1.0, 2.0, 3.0, 12.0, 13.0]),
    ]
