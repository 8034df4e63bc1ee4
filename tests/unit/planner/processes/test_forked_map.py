"""Processes compute what the calling code would, and leave nothing behind."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkProcess

import pytest

from shardwright.planner.processes import forked_map
from shardwright.planner.processes.forked_map import ForkedMap, may_fork


@pytest.fixture(autouse=True)
def forks_for_all_items(monkeypatch):
    """Beside the threads of a test runner, and for items that take no time."""
    monkeypatch.setattr(forked_map, "may_fork", lambda: True)
    monkeypatch.setattr(forked_map, "_LEAST_SECONDS", 0.0)


def test_results_are_in_the_order_of_the_items_and_from_processes_that_inherit_this_one():
    started = []
    inherited = object()  # which cannot be pickled by its identity

    def told(number):
        time.sleep(0.02 * (5 - number))
        return number, os.getpid(), id(inherited), list(started)

    found = ForkedMap(3, begin=lambda: started.append("here"))(told, range(5))
    assert [number for number, *_ in found] == list(range(5))
    assert {at for _, _, at, _ in found} == {id(inherited)}
    assert found[0][1] == os.getpid()
    assert len({pid for _, pid, _, _ in found}) == 3
    assert all(begun == ["here"] * (pid != os.getpid()) for _, pid, _, begun in found)
    assert started == []
    assert multiprocessing.active_children() == []


def test_the_caller_computes_its_share_and_keeps_what_it_caches():
    known = set()

    def cached(number):
        time.sleep(0.01)
        known.add(number)
        return number, os.getpid()

    found = ForkedMap(2)(cached, range(20))
    assert known == {number for number, pid in found if pid == os.getpid()}
    assert 0 in known
    assert 0 < len(known) < 20


def test_items_without_a_result_are_left_to_the_caller():
    caller = os.getpid()

    def difficult(number):
        if os.getpid() == caller:
            if number == 0:
                time.sleep(0.5)  # while the other process computes the others
            return number
        if number == 1:
            raise ValueError("as the serial code will find")
        if number == 2:
            return lambda: "which cannot be pickled"
        return number

    assert ForkedMap(2)(difficult, range(5)) == [0, None, None, 3, 4]
    assert multiprocessing.active_children() == []


def test_what_a_killed_process_took_is_left_to_the_caller():
    caller = os.getpid()

    def large(number):
        if number == 0:
            time.sleep(0.5)
        elif os.getpid() != caller:  # as one that takes too much memory
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert ForkedMap(2)(large, range(4)) == [0, None, 2, 3]
    assert multiprocessing.active_children() == []


def test_a_host_that_starts_no_more_processes_leaves_items_to_the_others(monkeypatch):
    start, left = ForkProcess.start, [1]

    def limited(self):
        if not left:
            raise OSError(errno.EAGAIN, "no more processes")
        left.pop()
        start(self)

    monkeypatch.setattr(ForkProcess, "start", limited)
    assert ForkedMap(3)(str, range(4)) == ["0", "1", "2", "3"]
    assert ForkedMap(3)(str, range(4)) == ["0", "1", "2", "3"]


def test_short_items_are_computed_without_processes(monkeypatch):
    monkeypatch.setattr(forked_map, "_LEAST_SECONDS", 10.0)
    asked = []
    assert ForkedMap(2)(lambda n: asked.append(n) or n, range(1, 4)) == [1, None, None]
    assert asked == [1]


def test_one_process_and_one_item_compute_nothing():
    assert ForkedMap(1)(str, range(3)) == [None] * 3
    assert ForkedMap(2)(str, range(1)) == [None]


INTERRUPTED = """
import os, signal, time
from shardwright.planner.processes import forked_map
forked_map._LEAST_SECONDS = 0.0
def slow(number):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)
os.setpgid(0, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job may ignore
signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 1.0)
forked_map.ForkedMap(2)(slow, range(4))
"""


def test_an_interrupt_ends_all_processes():
    """As Ctrl-C does, the signal reaches the whole group; only the caller reports it."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("KeyboardInterrupt\n")
    started = [int(line) for line in done.stdout.split()]
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


SAFE = """
import multiprocessing, sys, threading
from shardwright.planner.processes.forked_map import may_fork
assert may_fork()
def in_child():
    sys.exit(may_fork())  # of a daemonic process
child = multiprocessing.get_context("fork").Process(target=in_child, daemon=True)
child.start(); child.join(); assert child.exitcode == 0
wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start(); assert not may_fork()
wait.set(); thread.join(); assert may_fork()
import torch
assert may_fork()
from torch.distributed import HashStore, init_process_group
init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
assert not may_fork()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux only")
def test_processes_are_forked_where_that_is_safe(monkeypatch):
    subprocess.run([sys.executable, "-c", SAFE], check=True, timeout=100)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not may_fork()


DRAWS = """
import threading
from rich.progress import Progress
from tqdm import tqdm
from shardwright.planner.processes.forked_map import may_fork
with Progress(disable=False), tqdm(total=1) as bar:
    assert threading.active_count() == 3
    assert may_fork()
"""


def test_threads_that_draw_progress_bars_are_no_obstacle():
    subprocess.run([sys.executable, "-c", DRAWS], check=True, timeout=50)
