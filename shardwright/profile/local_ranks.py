"""Starts processes on this host that measure as one process group, and ends them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwright.ir.atomic_io import write_atomically
from shardwright.machine.backends import backend_on
from shardwright.machine.model import MachineError
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.shutdown import leave
from shardwright.runtime.device import bound, rank_device
from shardwright.runtime.ranks import threads_of

START_SECONDS = 180.0  # seconds to start and import torch, or for one measurement
_GRACE_SECONDS = 10.0  # seconds for the other processes after one has failed
Tell = Callable[[str, float], None]  # the current measurement, and the fraction that is done
Rank = Callable[..., None]  # rank, number of ranks, their folder, and arguments


def silent(_what: str, _part: float) -> None:
    """Report no progress."""


def run_ranks(devices: int, rank: Rank, given: tuple[Any, ...], tell: Tell, limit: float) -> str:
    """Run `rank` in `devices` new processes and return the text that rank 0 wrote as result.

    All processes have ended on return.

    Args:
        devices: the number of processes.
        rank: runs in each process, with its number, `devices`, a shared folder, and `given`.
        given: further arguments of `rank`, which are pickled.
        tell: called with the progress of rank 0.
        limit: seconds that the processes may take without progress.

    Raises:
        MachineError: a process failed, or there was no progress for `limit` seconds.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank, args=(number, devices, folder, *given), daemon=True)
            for number in range(devices)
        ]
        result, error = Path(folder) / "result", Path(folder) / "error.txt"
        try:
            for process in processes:
                process.start()
            deadline, progress = time.monotonic() + limit, ""
            while any(process.exitcode is None for process in processes):
                if time.monotonic() > deadline or error.exists():
                    break
                if any(process.exitcode for process in processes):  # one has failed
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                elif (now := _read(Path(folder) / "progress.txt")) != progress:
                    part, what = now.split("\n")
                    tell(what, float(part))
                    deadline, progress = time.monotonic() + limit, now
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()  # no effect on processes that have ended
                    process.join()
        if not result.exists():
            ends = [process.exitcode for process in processes]
            at = progress.partition("\n")[2] or "their start"
            silent_end = f"the processes did not get beyond {at} in time (they ended with {ends})"
            why = error.read_text() if error.exists() else silent_end
            raise MachineError(
                f"measuring {devices} devices on this host failed: {why}; ask for fewer devices or"
                f" name a preset such as {devices}xcpu"
            )
        return result.read_text()


def join(
    rank: int, devices: int, folder: str, measured: Callable[[Tell], str], *, tune_host: bool
) -> None:
    """Join the process group, measure, and on rank 0 write the result to `folder`.

    Args:
        rank: the number of this process.
        devices: the number of processes.
        folder: the folder that all processes share, for the store, progress, result and errors.
        measured: measures, given a function for progress, and returns the result as text.
        tune_host: whether the ranks change how the host runs them (`runtime/backend/gloo.py`).
    """
    try:
        device = rank_device(rank, devices)
        if device.type == "cpu":
            torch.set_num_threads(threads_of(devices))
        dist.init_process_group(
            backend_on(device.type).name,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=devices,
            timeout=timedelta(seconds=START_SECONDS),
            device_id=bound(device),
        )
        if tune_host:
            backend_of().tune_host()
        try:
            found = measured(_teller(folder) if rank == 0 else silent)
        finally:
            leave()
        if rank == 0:
            write_atomically(Path(folder) / "result", found)
    except Exception as e:
        if not isinstance(e, RuntimeError) or not (Path(folder) / "error.txt").exists():
            # The error of a rank that lost another rank is not the cause.
            write_atomically(Path(folder) / "error.txt", f"{type(e).__name__}: {e}".splitlines()[0])
        raise SystemExit(1) from e


def _teller(folder: str) -> Tell:
    """A function that writes progress to a file for the parent process."""

    def tell(what: str, part: float) -> None:
        write_atomically(Path(folder) / "progress.txt", f"{part}\n{what}")

    return tell


def _read(progress: Path) -> str:
    try:
        return progress.read_text()
    except OSError:  # no progress yet
        return ""
