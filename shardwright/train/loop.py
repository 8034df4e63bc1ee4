"""The training loop of one rank; rank 0 reports.

Every rank reads the same global batches, of which the parallel module takes the rank's part; or,
from a Dataset, each rank reads only its own samples (`read_own_samples`).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from torch import nn
from torch.amp import GradScaler

from shardwright.runtime.device import to_device
from shardwright.runtime.parameters.peak_memory import metered, tensors_of
from shardwright.train.checkpoint.saving import PeriodicSaver
from shardwright.train.checkpoint.state import Steppable, Trainable, TrainingState
from shardwright.train.coordination.consensus import Consensus
from shardwright.train.data.batch import Batch, JobError
from shardwright.train.data.samples import Samples, rows_of
from shardwright.train.data.shapes import fitted
from shardwright.train.job import Job
from shardwright.train.step import Stepper, StepResult, Steps

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step on rank 0.

    Attributes:
        step: the number of the step, from 1.
        loss: the loss of the step's global batches.
        seconds: wall-clock seconds of the step.
        units: tokens or samples of the batches that rank 0 read for the step.
        unit: `"tokens"` or `"samples"`.
        bytes: the peak memory of the rank so far (`peak_bytes`).
        gradient_norm: norm of the gradients before clipping; None if they are not clipped.
        tensor_bytes: peak bytes of tensors in this step; 0 if not measured.
        skipped: whether a gradient of the scaled loss was not finite, so that nothing was updated.
    """

    step: int
    loss: float
    seconds: float
    units: int
    unit: str
    bytes: int
    gradient_norm: float | None = None
    tensor_bytes: int = 0
    skipped: bool = False

    def __str__(self) -> str:
        skipped = "  update skipped, a gradient is not finite" if self.skipped else ""
        norm = "" if self.gradient_norm is None else f"  grad_norm {self.gradient_norm:.4f}"
        return (
            f"step {self.step:>5}  loss {self.loss:.4f}{norm}  {self.units / self.seconds:,.0f}"
            f" {self.unit}/s  memory {self.bytes / 2**30:.2f} GiB{skipped}"
        )


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The mean loss of the evaluation data after a step.

    Attributes:
        step: the number of finished steps.
        evaluation: the mean loss.
    """

    step: int
    evaluation: float

    def __str__(self) -> str:
        return f"step {self.step:>5}  evaluation loss {self.evaluation:.4f}"


def start(module: Trainable, job: Job, scaler: GradScaler | None = None) -> TrainingState:
    """The state of a run before its first step.

    Args:
        module: a module of `parallelize`, a `ShapeVariants`, or an `AsyncTrainable`.
        job: gives the optimizer, data and schedule of the run.
        scaler: scales the loss of a model that computes in float16; None: it is not scaled.
    """
    # Optimizers refuse an empty list of parameters, and a pipeline stage may have none. It gets two
    # empty ones, because `job.optimizer` may group parameters by their number of dimensions.
    idle = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 0))]
    optimizer = job.built_optimizer(list(module.parameters()) or idle)
    schedule = job.schedule(optimizer) if job.schedule is not None else None
    return TrainingState(module, optimizer, job.batches(), schedule, scaler=scaler)


def read_own_samples(run: TrainingState, job: Job) -> None:
    """Let each rank read only the samples of a Dataset that its part of a batch needs.

    Nothing changes if the data is no Dataset, if the job has several shapes of batches, padding or
    `Job.tokens`, which need global batches, or if the rank needs all samples (`rows_of`).
    """
    samples = run.batches.data
    fixed = len(run.module.known) == 1 and not job.padding and job.tokens is None
    if not isinstance(samples, Samples) or not fixed:
        return
    rows = rows_of(run.module, job.example)
    samples.rows = lambda size: rows
    run.reads_own = rows is not None


def train(
    run: TrainingState,
    job: Job,
    device: torch.device,
    report: Callable[[StepRecord | EvaluationRecord], None],
    saving: PeriodicSaver | None = None,
    consensus: Consensus | None = None,
    beat: Callable[[int], None] = lambda step: None,
    steps_of: Steps | None = None,
) -> bool:
    """Make the job's steps; report each, and evaluate and save when due.

    Every rank calls it.

    Args:
        run: the state of training, which is updated.
        job: the job of the run.
        device: the device to which batches are moved.
        report: called with the record of every step and evaluation.
        saving: writes checkpoints; None: none are written.
        consensus: stops all ranks at the same step, e.g. after SIGTERM, and compares their batches;
            None: neither.
        beat: called with `run.step` after each step and each evaluated batch.
        steps_of: makes the steps, e.g. those of an asynchronous pipeline; None: a `Stepper`.

    Returns:
        Whether all steps were made; False if `consensus` stopped the run, after a last checkpoint.

    Raises:
        NonFiniteLossError: a loss or a norm of gradients is not finite. Synchronous steps leave the
            weights as they were before the step, but for a norm on a GPU, which is read later.
        JobError: ranks have different batches, or a batch fits no planned shape.
        CheckpointError: the last checkpoint cannot be written.
    """
    step = steps_of or Stepper.of(cast(Steppable, run.module), job.clip_norm, job.tokens)
    counted = run.step + 1  # the second step: the optimizer has its state before it
    finished = _Reporter(report, device, whole=job.example if run.reads_own else None)
    while run.step < (last := job.last_step):
        # The loop overtakes a device, which goes on while batches are read.
        start = time.perf_counter()
        if consensus is not None and not consensus.may_go_on():
            finished(step.drain(run), start)
            if saving is not None:
                saving.now(run)
            return False
        given = [next(run.batches) for _ in range(job.accumulate)]
        if consensus is not None:
            consensus.check_batches(run.step + 1, [] if run.reads_own else given)
        finished.batches[run.step + 1] = given
        if device.type == "cpu":
            start = time.perf_counter()
        batches = [_on(device, _fitted(run.module, job, batch)) for batch in given]
        done, peak = _step(step, run, batches, device, metered=run.step == counted)
        finished.tensor_bytes |= peak
        if consensus is not None:
            consensus.settle()
        finished(done, start)
        evaluates = job.evaluation is not None and _is_due(run.step, job.evaluate_every, last)
        saves = saving is not None and saving.is_due(run, last)
        if evaluates or saves or run.step >= last:
            if not step.is_synchronous:  # else it is the step that began at `start`
                start = time.perf_counter()
            finished(step.drain(run), start)
        if evaluates:
            beats = partial(beat, run.step)
            report(EvaluationRecord(run.step, evaluate(run.module, job, device, beats)))
        if saving is not None:
            saving.after_step(run, last)
        beat(run.step)
    return True


def _step(
    step: Steps,
    run: TrainingState,
    batches: Sequence[Batch],
    device: torch.device,
    *,
    metered: bool,
) -> tuple[list[StepResult], dict[int, int]]:
    """Make a step; the steps that have finished, and the metered peaks in bytes by step."""
    # On CPUs the meter is a profiler, which crashes if messages are in flight when it ends.
    if not (metered and (step.is_synchronous or device.type == "cuda")):
        return step(run, batches), {}
    number = run.step + 1
    done, peak = _metered(step, run, batches, device)
    return done, {number: peak}


@dataclass
class _Reporter:
    """Reports finished steps.

    `batches` of steps that are not reported yet give their number of units, by step, and
    `tensor_bytes` the peak of tensors where it was measured. Where ranks read only their own
    samples, all global batches are of the size of `whole`.
    """

    report: Callable[[StepRecord | EvaluationRecord], None]
    device: torch.device
    whole: Batch | None = None
    batches: dict[int, Sequence[Batch]] = field(default_factory=dict)
    tensor_bytes: dict[int, int] = field(default_factory=dict)

    def __call__(self, done: Sequence[StepResult], start: float) -> None:
        each = (time.perf_counter() - start) / max(1, len(done))
        for one in done:
            given = self.batches.pop(one.step)
            read = given if self.whole is None else [self.whole] * len(given)
            units = [count_units(batch) for batch in read]
            total, unit = sum(number for number, _ in units), units[0][1]
            peak, norm = peak_bytes(self.device), one.gradient_norm
            tensors = self.tensor_bytes.pop(one.step, 0)
            found = one.step, one.loss, each, total, unit, peak, norm, tensors, one.skipped
            self.report(StepRecord(*found))


def _metered(
    step: Steps, run: TrainingState, batches: Sequence[Batch], device: torch.device
) -> tuple[list[StepResult], int]:
    """Make a step; the steps that have finished, and the peak bytes of tensors on this rank."""
    run.optimizer.zero_grad(set_to_none=True)  # as at the beginning of the step
    tensors = [*run.module.parameters(), *run.module.lasting_buffers().values()]
    tensors += tensors_of(run.optimizer)
    for batch in batches:
        values = batch.values() if isinstance(batch, Mapping) else batch
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return metered(lambda: step(run, batches), tensors, device)


def evaluate(
    module: Trainable, job: Job, device: torch.device, beat: Callable[[], None] = lambda: None
) -> float:
    """Compute the mean loss of the job's evaluation data, in evaluation mode and without gradients.

    Batches are weighted by `Job.tokens`, else by their number of samples. Every rank calls it.

    Args:
        module: a module of `parallelize`, a `ShapeVariants`, or an `AsyncTrainable`.
        job: a job with `evaluation`.
        device: the device to which batches are moved.
        beat: called after every batch.

    Raises:
        JobError: there is no batch, all weights are 0, or a batch fits no planned shape.
    """
    batches = job.evaluation_batches()
    assert batches is not None, "only jobs with evaluation data are evaluated"
    total = counted = 0.0
    module.train(False)
    try:
        with torch.no_grad():
            for given in batches:
                counts = float(job.tokens(given)) if job.tokens else float(_samples(given))
                if counts:
                    batch = _on(device, _fitted(module, job, given))
                    total += counts * module.loss(batch).item()
                    counted += counts
                beat()
    finally:
        module.train(True)
    if not counted:
        raise JobError("Job.evaluation gives nothing that counts; leave it out, or give some")
    return total / counted


def _fitted(module: Trainable, job: Job, batch: Batch) -> Batch:
    """`batch`, padded to a known shape where the job has several shapes or padding.

    Else it is not checked: it may be the rank's own part of a batch.
    """
    if len(module.known) == 1 and not job.padding:
        return batch
    return fitted(batch, module.known, job.padding)


def _is_due(step: int, every: int | None, steps: int) -> bool:
    return step >= steps or (every is not None and step % every == 0)


def _samples(batch: Batch) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    first = next((v for v in values if isinstance(v, torch.Tensor) and v.dim()), None)
    return 1 if first is None else len(first)


def count_units(batch: Batch) -> tuple[int, str]:
    """The size of a batch in tokens if its first tensor is a matrix of integers, else in samples.

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
    """Peak bytes of memory so far: of torch's allocator on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@contextmanager
def reporter(
    steps: int, losses: TextIO, console: Console
) -> Iterator[Callable[[StepRecord | EvaluationRecord], None]]:
    """Rank 0's report function, which handles each record.

    It prints a line to `console`, appends a JSON line to `losses`, and on a terminal moves a
    progress bar of `steps` steps.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("training", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=steps)

        def report(record: StepRecord | EvaluationRecord) -> None:
            console.print(str(record), highlight=False, soft_wrap=True)
            losses.write(json.dumps(asdict(record)) + "\n")
            losses.flush()
            progress.update(bar, completed=record.step)

        yield report


@dataclass
class TolerantReport:
    """A report function that writes to a disk that may be full; training goes on without it.

    Attributes:
        report: may raise `OSError`, the first of which is printed.
        what: what it writes, for the warning.
    """

    report: Callable[[StepRecord | EvaluationRecord], None]
    what: str
    warned: bool = False

    def __call__(self, record: StepRecord | EvaluationRecord) -> None:
        try:
            self.report(record)
        except OSError as e:
            if not self.warned:
                warn_of_disk(self.what, e)
            self.warned = True


def warn_of_disk(what: str, error: OSError) -> None:
    """Print that `what` cannot be written; do nothing where that cannot be printed either."""
    with suppress(OSError):
        reason = error.strerror or error
        print(f"warning: cannot write {what}: {reason}; training goes on", file=sys.stderr)


def _on(device: torch.device, batch: Batch) -> Batch:
    def moved(value: Any) -> Any:
        return to_device(value, device) if isinstance(value, torch.Tensor) else value

    if isinstance(batch, Mapping):
        return {key: moved(value) for key, value in batch.items()}
    return tuple(moved(value) for value in batch)
