"""Joins the ranks that torchrun started in a process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.machine.backends import backend_on
from shardwright.runtime.device import bound


def join(device: torch.device, timeout: timedelta) -> None:
    """Initialize the process group of the ranks that torchrun's environment describes.

    On one host the ranks use the store of torchrun, which listens before they start. A store of
    their own would listen on a port that was free when torchrun chose it; if another process takes
    the port before rank 0 does, the other ranks wait for it. Restarted ranks must not read entries
    of the ranks before them, so the keys of each start have a prefix of their own.

    Several hosts have no common count of restarts. There torch's default store is used, and
    torchrun must make a new one for each start (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`).

    Args:
        device: the device of this rank, which selects the backend.
        timeout: the timeout of the store and of the group's collectives.
    """
    backend = backend_on(device.type).name
    if not uses_launcher_store():
        dist.init_process_group(backend, timeout=timeout, device_id=bound(device))
        return
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(_start(), launcher_store(timeout)),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=bound(device),
    )


def uses_launcher_store() -> bool:
    """Whether all ranks are on one host and use torchrun's own store."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and os.environ.get("GROUP_WORLD_SIZE") == "1"


def launcher_store(timeout: timedelta) -> Any:
    """A new client of the store that all ranks share, with this `timeout`."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def is_first_to_fail(rank: int) -> bool:
    """Whether this rank is the first that reports a mistake, which all ranks may have made.

    Without torchrun's own store it is rank 0.
    """
    if not uses_launcher_store():
        return rank == 0
    key = f"{_start()}/failed"
    try:
        store = launcher_store(timedelta(seconds=5))
        return bool(store.compare_set(key, "", str(rank)) == str(rank).encode())
    except RuntimeError:  # the process that has the store is gone
        return True


def _start() -> str:
    """A prefix of keys that is unique for this start of this run."""
    known = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    return "/".join(("shardwright", *known))
