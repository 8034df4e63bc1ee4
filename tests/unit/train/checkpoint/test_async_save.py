"""The copy of a state that is written while training continues."""

import gc
import threading
from pathlib import Path

import torch

from shardwright.train.checkpoint.async_save import AsyncSaver

SIZE = 64 * 2**20


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_host_holds_one_copy(tmp_path):
    """`async_save` copies tensors of the host, too: with a copy of our own there were two."""
    gc.collect()  # what other tests left is not to be freed meanwhile
    state = {f"weight{i}": torch.ones(SIZE // 4) for i in range(4)}
    saver, most, done = AsyncSaver(), [resident()], threading.Event()
    start = most[0]

    def watch():
        while not done.wait(0.002):
            most.append(resident())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        saver.write(state, tmp_path / "checkpoint", lambda: None).result(60)
    finally:
        done.set()
        watching.join()
    assert SIZE * 4 * 0.5 < max(most) - start < SIZE * 4 * 1.5
