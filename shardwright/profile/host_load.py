"""Measures the CPU time that other processes use on this host during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import final

_TICKS_OF_WORK = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal (proc_stat(5))
_STAT = Path("/proc/stat")


def cores() -> set[int]:
    """The cores that this process may run on; empty if the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@final
class HostLoad:
    """Measures the load of the cores that this process may run on, since its construction.

    The load is 0 if the system does not report the use of its cores.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._cores = cores()
        self._before = self._worked()

    def used_by_others(self, ours: float) -> float:
        """The fraction of the cores' time that other processes used, from 0 to 1.

        `ours` are the CPU seconds of our own processes on these cores.
        """
        available = (time.monotonic() - self._since) * len(self._cores)
        if available <= 0:
            return 0.0
        others = self._worked() - self._before - ours
        return float(min(1.0, max(0.0, others / available)))

    def _worked(self) -> float:
        """Busy seconds of these cores since the system started; 0 if unknown."""
        try:
            lines = _STAT.read_text().splitlines()
        except OSError:  # not Linux
            return 0.0
        ticks = 0
        for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
            number = name.removeprefix("cpu")
            if number.isdigit() and int(number) in self._cores:
                ticks += sum(int(fields[place]) for place in _TICKS_OF_WORK)
        return ticks / os.sysconf("SC_CLK_TCK")
