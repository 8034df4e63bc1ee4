"""Counts the peak memory of tensors during a step.

On a GPU torch's allocator counts. On the CPU it does not, so one step runs
under `torch.profiler`, which reports every allocation and release of tensor
memory, also those of the backward pass.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardwright.runtime.parameters.host_state import is_home

T = TypeVar("T")
_NOISE = (b"USDT:", b"before the profiling started")  # starts, ends, and what was there before


def metered(
    run: Callable[[], T], alive: Iterable[torch.Tensor], device: torch.device
) -> tuple[T, int]:
    """The result of `run`, and the most bytes of tensors alive while it ran.

    `alive` are the tensors that exist before: parameters, gradients, the
    optimizer's state, buffers, the batch. Tensors that share memory count once. On a GPU
    everything that is allocated there counts, given or not.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device)
    before = storage_bytes(alive)
    gc.collect()  # what only cycles keep alive would be released at some other time
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    most = most_alive((e["args"]["Addr"], e["args"]["Bytes"]) for e in changes)
    return result, before + most


def most_alive(changes: Iterable[tuple[int, int]]) -> int:
    """The most bytes alive, after pairs (address, bytes taken or, if negative, given back).

    Releases by the backend's threads are not reported: memory counts as released when its address
    is allocated again.

    >>> most_alive([(8, 100), (8, 100), (9, 50), (8, -100), (9, -50)])
    150
    """
    alive: dict[int, int] = {}
    now = most = 0
    for address, change in changes:
        if change < 0:
            now -= alive.pop(address, -change)
            continue
        now += change - alive.get(address, 0)
        alive[address] = change
        most = max(most, now)
    return most


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the profiler writes to the standard error; other output is written afterwards."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said:
                if not any(noise in line for noise in _NOISE):
                    os.write(2, line)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind local parts of tensors, shared memory once.

    Parameters and state that are kept on the host do not count.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        if is_home(tensor):
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """The tensors of an optimizer's state, without those that are kept on the host."""
    for state in optimizer.state.values():
        found = (value for value in state.values() if isinstance(value, torch.Tensor))
        yield from (value for value in found if not is_home(value))
