"""One rank of a stalled run has the positions of all, and the store few calls of each."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwright.train.coordination import stalled_ranks
from shardwright.train.coordination.stalled_ranks import StalledRanks


class CountingStore:
    """A store in this process that counts the calls of each thread."""

    def __init__(self):
        self.values, self.calls, self.changed = {}, Counter(), threading.Condition()

    def _called(self):
        self.calls[threading.get_ident()] += 1

    def set(self, key, value):
        with self.changed:
            self._called()
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            self._called()
            return self.values[key]

    def add(self, key, amount):
        with self.changed:
            self._called()
            found = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(found).encode()
            return found

    def check(self, keys):
        with self.changed:
            self._called()
            return all(key in self.values for key in keys)

    def wait(self, keys, timeout):
        with self.changed:
            self._called()
            there = self.changed.wait_for(
                lambda: all(key in self.values for key in keys), timeout.total_seconds()
            )
        if not there:
            raise dist.DistStoreError("wait timeout")


def position(rank):
    return {"step": rank, "waits": True, "text": "waits in barrier"}


class OneThreadStore(CountingStore):
    """Counts the calls of each rank in `self.rank`; the others answer when the first one looks."""

    def __init__(self, others):
        super().__init__()
        self.rank, self.others = 0, others

    def _called(self):
        self.calls[self.rank] += 1

    def add(self, key, amount):
        if amount == 0 and self.others is not None:
            others, self.others = self.others, None
            others()
            self.rank = 0
        return super().add(key, amount)

    def wait(self, keys, timeout):
        self._called()  # it returns when the first rank has reported, and does nothing before


def test_four_thousand_ranks_make_three_calls_each():
    world, found = 4096, []

    def others():
        for store.rank in range(1, world):
            ranks = StalledRanks(store, store.rank, world, 60.0)
            found.append(ranks.collect(position(store.rank)))

    store = OneThreadStore(others)
    first = StalledRanks(store, 0, world, 60.0)
    assert first.collect(position(0)) == {rank: position(rank) for rank in range(world)}
    first.reported()
    assert found == [None] * (world - 1)
    assert {store.calls[rank] for rank in range(1, world)} == {3}
    assert store.calls[0] <= 2 * world + 5


def test_calls_grow_with_the_ranks_and_not_with_their_square():
    world, store = 128, CountingStore()

    def stalled(rank):
        ranks = StalledRanks(store, rank, world, 60.0)
        found = ranks.collect(position(rank))
        if found is not None:
            ranks.reported()
        return found

    with ThreadPoolExecutor(world) as threads:
        found = [one for one in threads.map(stalled, range(world)) if one is not None]
    assert found == [{rank: position(rank) for rank in range(world)}]
    *others, reporter = sorted(store.calls.values())
    assert max(others) <= 3
    assert reporter <= 2 * world + 60 / 0.1  # and it looks every tenth of a second


def test_another_rank_reports_if_the_first_does_not(monkeypatch):
    monkeypatch.setattr(stalled_ranks, "_COLLECTING", 0.1)
    store = CountingStore()
    first = StalledRanks(store, 1, 3, 0.1)
    assert first.collect(position(1)) == {1: position(1)}  # and ends before it reports
    second = StalledRanks(store, 0, 3, 0.1)
    assert second.collect(position(0)) == {0: position(0), 1: position(1)}
    second.reported()
    assert StalledRanks(store, 2, 3, 0.1).collect(position(2)) is None


def test_a_store_that_is_gone_raises():
    class Gone(CountingStore):
        def wait(self, keys, timeout):
            raise dist.DistNetworkError("connection reset")

        def add(self, key, amount):
            if key.endswith("second"):
                raise dist.DistNetworkError("connection reset")
            return super().add(key, amount)

    store = Gone()
    StalledRanks(store, 0, 2, 0.1).collect(position(0))
    with pytest.raises(RuntimeError, match="connection reset"):
        StalledRanks(store, 1, 2, 0.1).collect(position(1))


def test_stores_of_torch_have_the_interface(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError):
        store.wait(["absent"], timedelta(seconds=0.1))
    assert StalledRanks(store, 0, 1, 0.1).collect(position(0)) == {0: position(0)}
