"""Where plans run: on ranks of this host, or on two hosts that a slow link joins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.hosts import Cluster, Link, hosts
from benchmarks.hosts.measured import measured
from benchmarks.record import ROOT, TUNE_HOST
from shardwright.machine.files.loading import load_machine
from shardwright.machine.model import Machine

RANKS = 2
_START_SECONDS = 240.0  # on top of what is asked for; a busy machine needs some of it


class Place(Protocol):
    """A few ranks somewhere."""

    @property
    def name(self) -> str:
        """As rows have it."""

    def machine(self, seconds: float) -> Machine:
        """What they reach, measured for about `seconds`."""

    def run(self, module: str, *arguments: str, seconds: float) -> None:
        """Run `module` on all; raises an `Exception` if it fails or takes far longer."""


@dataclass(frozen=True)
class Local:
    """Processes of one thread on this host."""

    name: str = "one host"
    ranks: int = RANKS

    def machine(self, seconds: float) -> Machine:
        """As `shardwright profile` sees it."""
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "machine.toml")
            given = ["--devices", str(self.ranks), "--seconds", str(seconds), "-o", file, "--json"]
            given += ["--tune-host"] if TUNE_HOST else []
            self._python("-m", "shardwright", "profile", *given, seconds=3 * seconds)
            return load_machine(file)

    def run(self, module: str, *arguments: str, seconds: float) -> None:
        """By torchrun."""
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        self._python("-m", *torchrun, "-m", module, *arguments, seconds=seconds)

    def _python(self, *arguments: str, seconds: float) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(seconds + _START_SECONDS)
            except subprocess.TimeoutExpired:
                # torchrun ends its ranks when it is asked to, which it could not if it were killed.
                process.terminate()
                process.wait(60)
                raise
            if status:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                why = f"{arguments[1]} ended with status {status}: {_reason(lines)}"
                raise RuntimeError("\n".join([why, *lines]))


def _reason(lines: list[str]) -> str:
    """What went wrong, of what a program said: a rank's own words rather than torchrun's.

    A rank that a signal ended says none; torchrun says which one that was. What a rank says before
    it has joined the others is not marked as its own.
    """
    ranks = [line for line in lines if re.match(r"\[rank\d+\]: \S*Error", line)]
    signals = [line for line in lines if re.search(r"exitcode\s*: -\d", line)]
    errors = [line for line in reversed(lines) if "Error" in line]
    own = [line for line in errors if "ChildFailedError" not in line]
    said = [*ranks, *signals, *own, *errors, *lines[-1:]]
    return said[0].strip() if said else "it said nothing"


@dataclass(frozen=True)
class Remote:
    """Two hosts of one core each."""

    cluster: Cluster

    @property
    def name(self) -> str:
        """With the link's speed."""
        return f"two hosts, {self.cluster.link}"

    def machine(self, seconds: float) -> Machine:
        """As `shardwright profile` under torchrun sees it."""
        return measured(self.cluster, seconds)

    def run(self, module: str, *arguments: str, seconds: float) -> None:
        """By torchrun on both."""
        limit = seconds + _START_SECONDS
        self.cluster.torchrun(module, *arguments, timeout_seconds=limit)


@contextmanager
def two_hosts(bit_per_s: float) -> Iterator[Place]:
    """Two hosts, while it lasts; raises `HostsUnavailableError` where there can be none."""
    with hosts(2, Link(bit_per_s=bit_per_s)) as cluster:
        yield Remote(cluster)
