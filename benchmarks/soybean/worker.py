"""One rank: all contestants take steps in turn, so that what else the machine does hits all.

Started by `run` under torchrun with a file that says what to do; as soon as a network is measured,
rank 0 writes the seconds of every step, the slowest rank's, beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from benchmarks.soybean.contestants import OURS, RIVALS, Batch, Step, ours
from benchmarks.soybean.models import Classified, made

_ALIKE = 1e-3  # how far losses may be apart, relatively: float32, sums in other orders


@dataclass(frozen=True, slots=True)
class Subject:
    """A network at a scale and a global batch."""

    model: str
    scale: float
    batch: int


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks are to measure: each subject with its plan, against all rivals.

    Rounds of a subject go on for `seconds`, but there are `least` of them. None is begun after
    `until`, in seconds since the epoch.
    """

    subjects: tuple[Subject, ...]
    plans: tuple[str, ...]  # JSON
    rivals: tuple[str, ...]
    seconds: float
    least: int
    until: float

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Task:
        """What `write` has written."""
        found: dict[str, Any] = json.loads(file.read_text())
        found["subjects"] = tuple(Subject(**one) for one in found["subjects"])
        found["plans"], found["rivals"] = tuple(found["plans"]), tuple(found["rivals"])
        return cls(**found)


def measured_file(task: Path, number: int) -> Path:
    """Where the seconds of subject `number` are, once it is measured."""
    return task.with_name(f"{task.name}.{number}")


def main() -> None:
    """Take the steps, compare the losses, write the seconds."""
    file = Path(sys.argv[1])
    task = Task.read(file)
    dist.init_process_group("gloo")
    try:
        for number, (subject, plan) in enumerate(zip(task.subjects, task.plans, strict=True)):
            if not _agreed(time.time() < task.until):
                break
            seconds = _measured(task, subject, plan)
            if dist.get_rank() == 0:
                measured_file(file, number).write_text(json.dumps(seconds))
        dist.barrier()  # none leaves while another still sends
    finally:
        dist.destroy_process_group()


def _measured(task: Task, subject: Subject, plan: str) -> dict[str, list[float]]:
    def network() -> tuple[Classified, Batch]:
        return made(subject.model, subject.scale, subject.batch)

    steps: dict[str, Step] = {OURS: ours(*network(), sw.Plan.from_json(plan))}
    for name in task.rivals:
        steps[name] = RIVALS[name](*network())
    for _ in range(2):  # DDP makes its buckets anew after the first step
        _compare({name: step() for name, step in steps.items()})
    rounds: list[list[float]] = []
    start = time.perf_counter()
    more = True
    while more:
        rounds.append(_round(list(steps.values()), first=len(rounds)))
        more = _agreed(len(rounds) < task.least or time.perf_counter() - start < task.seconds)
    slowest = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(steps, slowest.T.tolist(), strict=True))


def _round(steps: Sequence[Step], first: int) -> list[float]:
    """Seconds of one step of each; who begins changes from round to round."""
    seconds = [0.0] * len(steps)
    for i in range(len(steps)):
        place = (first + i) % len(steps)
        dist.barrier()
        start = time.perf_counter()
        steps[place]()
        seconds[place] = time.perf_counter() - start
    return seconds


def _compare(losses: dict[str, torch.Tensor]) -> None:
    """Raise unless all have the same loss, as those do that compute the same."""
    shares = torch.stack([loss.double() for loss in losses.values()])
    dist.all_reduce(shares)
    found = dict(zip(losses, shares.tolist(), strict=True))
    if max(found.values()) - min(found.values()) > _ALIKE * max(found.values()):
        raise RuntimeError(f"contestants do not compute the same loss: {found}")


def _agreed(more: bool) -> bool:
    """What rank 0 says."""
    word = torch.tensor([more])
    dist.broadcast(word, 0)
    return bool(word.item())


if __name__ == "__main__":
    main()
