"""The training loop of one rank: the same steps everywhere, one voice on rank 0.

Every rank draws the same global batches; what a rank takes of them is the
parallel module's matter.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

import torch

from shardwright.train.checkpoint import Checkpoints
from shardwright.train.job import Batch, Job
from shardwright.train.reading import CheckpointError
from shardwright.train.state import Run, Trainable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as rank 0 saw it. `bytes` is the most memory the rank has held so far."""

    step: int
    loss: float
    seconds: float
    units: int  # tokens or samples of the global batch
    unit: str
    bytes: int

    def __str__(self) -> str:
        return (
            f"step {self.step:>5}  loss {self.loss:.4f}  {self.units / self.seconds:,.0f}"
            f" {self.unit}/s  memory {self.bytes / 2**30:.2f} GiB"
        )


@dataclass(frozen=True, slots=True)
class Saving:
    """When the loop saves: every so many steps and at the end. `failed` hears of errors."""

    checkpoints: Checkpoints
    every: int
    failed: Callable[[CheckpointError], None]

    def after_step(self, run: Run, steps: int) -> None:
        """Save if it is time. What the disk does not take is told, and tried again next time."""
        if run.step < steps and run.step % self.every:
            return
        try:
            self.checkpoints.save(run)
        except CheckpointError as e:
            self.failed(e)
            if run.step >= steps:
                raise


def start(module: Trainable, job: Job) -> Run:
    """A run of the job before its first step."""
    optimizer = job.optimizer(module.parameters())
    schedule = job.schedule(optimizer) if job.schedule is not None else None
    return Run(module, optimizer, job.batches(), schedule)


def train(
    run: Run,
    steps: int,
    device: torch.device,
    report: Callable[[StepRecord], None],
    saving: Saving | None = None,
) -> None:
    """Go on with `run` until `steps` are done, report every step and save when it is time."""
    while run.step < steps:
        batch = next(run.batches)
        start = time.perf_counter()
        loss = run.module.train_step(run.optimizer, _on(device, batch)).item()
        if run.schedule is not None:
            run.schedule.step()
        run.step += 1
        seconds = time.perf_counter() - start
        units, unit = count_units(batch)
        report(StepRecord(run.step, loss, seconds, units, unit, peak_bytes(device)))
        if saving is not None:
            saving.after_step(run, steps)


def count_units(batch: Batch) -> tuple[int, str]:
    """How much one batch holds: tokens if its first tensor is a table of integers, else samples.

    >>> count_units({"input_ids": torch.zeros(4, 8, dtype=torch.int64)})
    (32, 'tokens')
    """
    values = batch.values() if isinstance(batch, Mapping) else batch
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if first is None or first.ndim == 0:
        return 1, "samples"
    if first.ndim == 2 and not first.is_floating_point():
        return first.numel(), "tokens"
    return first.shape[0], "samples"


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: on a GPU by torch's allocator, else by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@contextmanager
def reporter(
    steps: int, losses: TextIO, console: Console
) -> Iterator[Callable[[StepRecord], None]]:
    """Rank 0's report: a log line per step, the losses as JSON lines, a bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("training", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=steps)

        def report(record: StepRecord) -> None:
            console.print(str(record), highlight=False, soft_wrap=True)
            losses.write(json.dumps(asdict(record)) + "\n")
            losses.flush()
            progress.update(bar, completed=record.step)

        yield report


def _on(device: torch.device, batch: Batch) -> Batch:
    def moved(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    if isinstance(batch, Mapping):
        return {key: moved(value) for key, value in batch.items()}
    return tuple(moved(value) for value in batch)
