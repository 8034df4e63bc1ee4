"""How long a rank stays awake for a collective, and what comes of it."""

import os
import time

import pytest

from shardwright.runtime.comm import spin_wait


class Work:
    """Done when it was asked so often."""

    def __init__(self, asked, error=None):
        self.left, self.error, self.waited = asked, error, 0

    def is_completed(self):
        self.left -= 1
        return self.left < 0

    def wait(self):
        self.waited += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def yields(monkeypatch):
    """How often the core was given to others."""
    found = []
    monkeypatch.setattr(os, "sched_yield", lambda: found.append(1))
    return found


def test_others_get_the_core_until_it_is_done(yields):
    work = Work(7)
    spin_wait.wait_for(spin_wait._Awake(work), "a sum")
    assert (len(yields), work.waited) == (7, 1)


def test_long_waits_sleep(yields, monkeypatch):
    monkeypatch.setattr(spin_wait, "_LOOKS", 3)
    monkeypatch.setattr(spin_wait, "_YIELDS", 5)
    monkeypatch.setattr(time, "process_time", time.perf_counter)
    work = Work(1_000)
    spin_wait._Awake(work).wait()
    assert (len(yields), work.waited) == (15, 1)


def test_who_waits_sleeps_where_others_want_the_core(yields, monkeypatch):
    clock = iter(range(0, 1_000_000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    work = Work(1_000)
    spin_wait._Awake(work).wait()
    assert (len(yields), work.waited) == (spin_wait._YIELDS, 1)


def test_what_went_wrong_is_raised(yields):
    with pytest.raises(RuntimeError, match="connection closed"):
        spin_wait._Awake(Work(0, RuntimeError("connection closed by peer"))).wait()
    assert not yields
