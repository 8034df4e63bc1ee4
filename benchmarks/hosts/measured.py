"""Hosts measured as a user would measure them, by `shardwright profile` under torchrun."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.hosts.cluster import Cluster
from benchmarks.record import TUNE_HOST
from shardwright.machine.files.loading import load_machine
from shardwright.machine.model import Machine

_START_SECONDS = 240.0  # allowance to start and import torch, and for measurements that take longer


def measured(cluster: Cluster, seconds: float, processes_per_host: int = 1) -> Machine:
    """The machine that the hosts are, measured for about `seconds` on all ranks at once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        cluster.torchrun(
            *("shardwright", "profile", "--output", str(file), "--seconds", str(seconds)),
            *(["--tune-host"] if TUNE_HOST else []),
            timeout_seconds=_START_SECONDS + 4 * seconds,
            processes_per_host=processes_per_host,
        )
        return load_machine(file)
