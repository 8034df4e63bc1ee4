"""Which threads take turns."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.runtime.backend import gloo_threads
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has them")


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


@pytest.mark.parametrize("ranks_of_a_host", ["1", "2"])
def test_gloos_threads_take_turns_and_no_others(threads, monkeypatch, ranks_of_a_host):
    folder, kinds = threads
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_a_host)
    for _ in range(2):
        assert gloo_threads.have_senders_take_turns(folder) == 2
    batch, other = os.SCHED_BATCH, os.SCHED_OTHER
    assert kinds == {1: other, 2: batch, 3: batch, 4: os.SCHED_IDLE}  # which somebody chose


def test_where_the_system_forbids_it_nothing_happens(threads, monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert gloo_threads.have_senders_take_turns(threads[0]) == 0


def test_without_ranks_and_on_other_systems_there_are_none(threads, monkeypatch):
    assert gloo_threads.have_senders_take_turns(Path("/nowhere")) == 0
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert gloo_threads.have_senders_take_turns(threads[0]) == 0


def kinds_after_parallelize():
    model = nn.Linear(8, 8)
    machine = sw.Machine.preset("2xcpu")
    sw.parallelize(model, sw.plan(model, (torch.randn(4, 8),), machine=machine))
    tasks = Path("/proc/self/task").glob("*")
    return sorted(
        (name, os.sched_getscheduler(int(task.name)))
        for task in tasks
        if "gloo" in (name := (task / "comm").read_text().strip())
    )


def test_so_do_those_of_what_is_parallelized():
    for found in run_ranks(2, kinds_after_parallelize):
        assert {name for name, _ in found} == {"gloo_tcp_loop", "pt_gloo_runloop"}
        assert {kind for _, kind in found} == {os.SCHED_BATCH}
