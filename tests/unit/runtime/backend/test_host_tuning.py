"""What tuning does to the allocator, to Gloo's threads and to waits."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwright.runtime.backend import host_tuning
from shardwright.runtime.backend.host_tuning import keep_freed_memory

PAGES = """
import resource, sys, torch
from shardwright.runtime.backend.host_tuning import keep_freed_memory

kept = keep_freed_memory() and keep_freed_memory()

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for mib in (1, 3, 48) * 4:
    torch.empty(mib * 2**18).fill_(1)
before = pages()
for mib in (1, 3, 48) * 4:
    torch.empty(mib * 2**18).fill_(1)
print(kept, pages() - before)
"""


def test_blocks_of_every_size_are_not_mapped_again():
    if not keep_freed_memory({}):
        pytest.skip("another malloc than glibc's")
    ended = subprocess.run(
        [sys.executable, "-c", PAGES], capture_output=True, text=True, timeout=120, check=True
    )
    kept, pages = ended.stdout.split()
    assert kept == "True"
    assert int(pages) < 13_312  # a quarter of what is allocated; else all of it


@pytest.mark.parametrize(
    "name, value",
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_MAX_", "65536"),
        ("MALLOC_MMAP_THRESHOLD_", "33554432"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_user_has_set_stays(name, value):
    assert not keep_freed_memory({name: value})


ONLY_LINUX = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="of Linux")


@pytest.fixture
def threads(tmp_path, monkeypatch):
    """Threads of a rank of two, and their kinds."""
    kinds = {1: os.SCHED_OTHER, 2: os.SCHED_OTHER, 3: os.SCHED_OTHER, 4: os.SCHED_IDLE}
    names = ("python", "gloo_tcp_loop", "pt_gloo_runloop", "gloo_tcp_loop")
    for thread, name in zip(kinds, names, strict=True):
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "comm").write_text(name + "\n")
    (tmp_path / "5").mkdir()  # it ended while we looked

    def put(thread, kind, parameter):
        assert parameter == os.sched_param(0)
        kinds[thread] = kind

    monkeypatch.setattr(os, "sched_getscheduler", kinds.__getitem__)
    monkeypatch.setattr(os, "sched_setscheduler", put)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return tmp_path, kinds


@ONLY_LINUX
@pytest.mark.parametrize("ranks_of_a_host", ["1", "2"])
def test_gloos_threads_take_turns_and_no_others(threads, monkeypatch, ranks_of_a_host):
    folder, kinds = threads
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_a_host)
    for _ in range(2):
        assert host_tuning.have_senders_take_turns(folder) == 2
    batch, other = os.SCHED_BATCH, os.SCHED_OTHER
    assert kinds == {1: other, 2: batch, 3: batch, 4: os.SCHED_IDLE}  # which somebody chose


@ONLY_LINUX
def test_where_the_system_forbids_it_nothing_happens(threads, monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert host_tuning.have_senders_take_turns(threads[0]) == 0


@ONLY_LINUX
def test_without_ranks_and_on_other_systems_there_are_none(threads, monkeypatch):
    assert host_tuning.have_senders_take_turns(Path("/nowhere")) == 0
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert host_tuning.have_senders_take_turns(threads[0]) == 0


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
    host_tuning.SpinningWait(work).wait()
    assert (len(yields), work.waited) == (7, 1)


def test_long_waits_sleep(yields, monkeypatch):
    monkeypatch.setattr(host_tuning, "_MOST_READINGS", 3)
    monkeypatch.setattr(host_tuning, "_YIELDS", 5)
    monkeypatch.setattr(time, "process_time", time.perf_counter)
    work = Work(1_000)
    host_tuning.SpinningWait(work).wait()
    assert (len(yields), work.waited) == (15, 1)


def test_who_waits_sleeps_where_others_want_the_core(yields, monkeypatch):
    clock = iter(range(0, 1_000_000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    work = Work(1_000)
    host_tuning.SpinningWait(work).wait()
    assert (len(yields), work.waited) == (host_tuning._YIELDS, 1)


def test_what_went_wrong_is_raised(yields):
    with pytest.raises(RuntimeError, match="connection closed"):
        host_tuning.SpinningWait(Work(0, RuntimeError("connection closed by peer"))).wait()
    assert not yields
