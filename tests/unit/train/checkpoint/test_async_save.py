"""The copy of a state that is written while training continues."""

import threading
from pathlib import Path

import torch

from shardwright.train.checkpoint.async_save import AsyncSaver
from tests.harness.ranks import run_ranks

SIZE = 64 * 2**20


def test_the_host_holds_one_copy(tmp_path):
    """`async_save` copies tensors of the host, too: with a copy of our own there were two."""
    # In a process of its own, which has no freed memory to write the copy to.
    (growth,) = run_ranks(1, grown, tmp_path / "checkpoint")
    assert SIZE * 4 * 0.5 < growth < SIZE * 4 * 1.5


def grown(folder):
    """Bytes by which a process that saves four tensors grows meanwhile, at most."""
    state = {f"weight{i}": torch.ones(SIZE // 4) for i in range(4)}
    saver, most, done = AsyncSaver(), [resident()], threading.Event()

    def watch():
        while not done.wait(0.002):
            most.append(resident())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        saver.write(state, folder, lambda: None).result(60)
    finally:
        done.set()
        watching.join()
    return max(most) - most[0]


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
