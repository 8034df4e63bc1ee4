"""Runs a module of the package on local ranks, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile

_LAUNCHER = "torch/distributed/elastic/"


class RanksError(RuntimeError):
    """A rank failed; the message ends with the last lines it wrote."""


def torchrun(module: str, args: Sequence[str], processes: int) -> list[str]:
    """The command that runs `python -m module` on `processes` local ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), "-m", module, *args]


def rank_environment(processes: int) -> dict[str, str]:
    """This environment, with the cores shared out among the ranks unless the user did so."""
    return {"OMP_NUM_THREADS": str(threads_of(processes)), **os.environ}


def threads_of(processes: int) -> int:
    """Threads of each of so many processes that share this host's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)


def run_ranks(module: str, args: Sequence[str], processes: int, *, timeout: float = 600.0) -> None:
    """Run `module` on local ranks to the end; raises `RanksError` if one fails or time is up."""
    try:
        done = subprocess.run(
            torchrun(module, args, processes),
            env=rank_environment(processes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise RanksError(f"{processes} ranks of {module} did not finish in {timeout:.0f} s") from e
    if done.returncode:
        lines = done.stdout.splitlines()
        # The launcher sums up at the end that a rank failed; why is what the rank said before.
        ours = list(takewhile(lambda line: _LAUNCHER not in line, lines))
        tail = "\n".join((ours or lines)[-40:])
        raise RanksError(f"{processes} ranks of {module} failed ({done.returncode}):\n{tail}")
