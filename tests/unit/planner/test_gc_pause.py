import gc
import subprocess
import sys
import weakref

import pytest

from shardwright.planner.gc_pause import paused


@pytest.fixture
def nothing_frozen():
    """As in a process of a user; the suite freezes what it imports (`tests/conftest.py`)."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was_found_also_after_an_error(enabled):
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(RuntimeError), paused():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


def test_no_pass_begins_when_the_pause_ends(nothing_frozen):
    passes = []
    gc.callbacks.append(lambda phase, info: passes.append(info["generation"]))
    try:
        with paused():
            kept = [[i] for i in range(100_000)]
        kept += [[i] for i in range(10)]
        assert passes == []
    finally:
        gc.callbacks.pop()


def test_what_was_left_behind_in_a_pause_is_found_later():
    class Loop:
        pass

    with paused():
        loop = Loop()
        loop.itself, gone = loop, weakref.ref(loop)
        del loop
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_others_froze_stays_frozen(nothing_frozen):
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused():
        pass
    assert 0 < gc.get_freeze_count() <= frozen


@pytest.mark.parametrize("how, passes", [("paused", True), ("paused_to_the_end", False)])
def test_a_process_that_pauses_to_the_end_ends_without_a_pass(how, passes):
    code = f"""
from shardwright.planner.gc_pause import {how} as pause

class Loop:
    def __del__(self):
        print("found", flush=True)

with pause():
    loop = Loop()
    loop.itself = loop
    del loop
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout == "found\n") is passes
