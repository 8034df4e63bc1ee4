"""How long something takes on this rank, measured together with the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import final

import torch
import torch.distributed as dist

_MOST_REPEATS = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """`work` of a kind took `seconds`: FLOP, bytes of memory, or bytes of the local tile."""

    kind: str
    work: float
    seconds: float


@final
class Stopwatch:
    """Takes samples on all ranks at the same time, each for about `seconds`.

    Every rank runs everything equally often, so that collectives may be timed.
    `tell` hears what is measured and which part is done, of as many samples as are `expected`.
    """

    def __init__(
        self, kind: str, seconds: float, expected: int, tell: Callable[[str, float], None]
    ) -> None:
        self.device = torch.device(kind)
        self.seconds = seconds
        self.samples: list[Sample] = []
        self._expected = expected
        self._tell = tell

    def take(self, kind: str, work: float, run: Callable[[], object]) -> float:
        """Median seconds of one `run`, after a first that does not count; also kept as a sample."""
        self._tell(kind, min(1.0, len(self.samples) / self._expected))
        run()
        dist.barrier()
        first = self.once(run)
        repeats = torch.tensor([self.seconds / max(first, 1e-7)], device=self.device)
        dist.broadcast(repeats, 0)  # rank 0 says how many fit
        more = min(_MOST_REPEATS, int(repeats.item())) - 1
        found = median([first, *(self.once(run) for _ in range(more))])
        self.samples.append(Sample(kind, work, found))
        return found

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of one `run`, until the device has done it."""
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def slowest(samples: list[Sample]) -> list[Sample]:
    """Each sample as the rank took it that was slowest at it; equal on every rank."""
    found: list[list[Sample]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, samples)
    worst = [max(sample.seconds for sample in same) for same in zip(*found, strict=True)]
    return [
        Sample(one.kind, one.work, seconds) for one, seconds in zip(samples, worst, strict=True)
    ]
