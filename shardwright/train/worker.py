"""The program of each rank: join the process group, build the parallel module, train.

`python -m shardwright.train.worker --target … --plan … --losses …`
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from shardwright.ir.atomic_io import printable
from shardwright.ir.plan import Plan, PlanError
from shardwright.plan_io.files import plan_for
from shardwright.runtime.async_pipeline.prediction import PredictionError
from shardwright.runtime.async_pipeline.runner import AsyncPipeline
from shardwright.runtime.backend.registry import backend_for
from shardwright.runtime.batch import BatchError
from shardwright.runtime.comm.channel import StageFailed
from shardwright.runtime.comm.shutdown import end_within, leave
from shardwright.runtime.device import rank_device
from shardwright.runtime.parallel import parallelize
from shardwright.runtime.parameters.loss_scaling import scaler_of
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.async_loop import AsyncLoop, AsyncTrainable
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.export import (
    SUFFIX,
    check_export,
    export_pretrained,
    export_safetensors,
)
from shardwright.train.checkpoint.reading import CheckpointError
from shardwright.train.checkpoint.saving import PeriodicSaver
from shardwright.train.checkpoint.state import Steppable, TrainingState
from shardwright.train.coordination.consensus import Consensus, check_same_setup
from shardwright.train.coordination.rendezvous import (
    is_first_to_fail,
    join,
    launcher_store,
)
from shardwright.train.coordination.watchdog import Watchdog, timeout_of
from shardwright.train.data.batch import JobError
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.json_codec import ValueFormatError
from shardwright.train.loop import (
    EvaluationRecord,
    StepRecord,
    TolerantReport,
    read_own_samples,
    reporter,
    start,
    train,
)
from shardwright.train.out_of_memory import RankOutOfMemoryError, explained
from shardwright.train.routing import measured_routing
from shardwright.train.step import NonFiniteLossError, Stepper, Steps
from shardwright.train.targets.target import TargetError, build_without_memory, load_job
from shardwright.train.tensorboard import MetricWriter
from shardwright.train.traced_step import Traced, trace_file

_LEAVING_SECONDS = 20.0  # the longest time that a failed rank takes to end
Report = Callable[[StepRecord | EvaluationRecord], None]
_MISTAKES = (
    BatchError,
    CheckpointError,
    JobError,
    NonFiniteLossError,
    PlanError,
    PredictionError,
    TargetError,
    ValueFormatError,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank to the end of its steps; the first rank with a mistake of the user says it."""
    options = parser().parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        _run(options)
    except _MISTAKES as e:
        sys.exit(_shown(e) if is_first_to_fail(rank) else 1)
    except StageFailed as e:  # printed by every rank, because any may have ended
        sys.exit(_shown(f"rank {rank} stops: {e}"))
    except RankOutOfMemoryError as e:  # the error of this rank alone
        sys.exit(_shown(e))


def _shown(text: object) -> str:
    """A text for a terminal, without control characters of names in files."""
    return "\n".join(printable(line) for line in f"shardwright: {text}".splitlines())


def _run(options: argparse.Namespace) -> None:
    """Load job and plan, join the other ranks, and train under a watchdog."""
    job = load_job(options.target, options.batch, options.seq, options.set)
    job = replace(job, weights=options.weights or job.weights)
    job = replace(job, compiled=options.compile or job.compiled, steps=options.steps or job.steps)
    plan = plan_for(options.plan, int(os.environ.get("WORLD_SIZE", "1")))
    job = replace(job, compiled=job.compiled or plan.compiled)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = rank_device(int(os.environ.get("LOCAL_RANK", "0")), local_ranks)
    backend = backend_for(device.type)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    watchdog = Watchdog(
        partial(launcher_store, timedelta(seconds=10)),  # the group's own store may be blocked
        rank,
        world,
        options.stall_timeout,
        options.start_timeout,
        _print_error,
    )
    try:
        longest = max(options.stall_timeout, options.start_timeout)
        join(device, timeout_of(longest))
        if options.tune_host:
            backend.tune_host()
        watchdog.starting()
        try:
            _train(job, plan, device, options, watchdog)
        except torch.OutOfMemoryError as e:
            raise RankOutOfMemoryError(explained(plan, device, rank, e)) from e
    except BaseException:
        end_within(_LEAVING_SECONDS)
        watchdog.close()
        if dist.is_initialized():
            leave(failed=True)
        raise
    watchdog.close()
    leave()


def _train(
    job: Job, plan: Plan, device: torch.device, options: argparse.Namespace, watchdog: Watchdog
) -> None:
    """Build the module, resume, and run all steps with their reports and checkpoints."""
    model = build_without_memory(job)
    check_same_setup(plan, model)
    if options.export:
        check_export(model, options.export)
    watchdog.starting()
    steps: Steps | None
    timeout = timeout_of(max(options.stall_timeout, options.start_timeout))
    module, steps, ahead = _module(job, model, plan, device, timeout)
    watchdog.starting()
    seed_all(job.seed)
    run = start(module, job, scaler_of(plan.numerics, device))
    read_own_samples(run, job)
    saving = _resumed(run, plan, job.last_step, options) if options.checkpoint else None
    watchdog.beat(run.step)
    with ExitStack() as stack:
        if saving is not None:
            stack.callback(saving.checkpoints.close)
        report: Report = _report_nothing
        if dist.get_rank() == 0:
            losses = stack.enter_context(_appended(options.losses))
            written = stack.enter_context(reporter(job.last_step, losses, Console()))
            report = TolerantReport(written, "the records of steps")
            if options.tensorboard:
                board = stack.enter_context(MetricWriter(options.tensorboard))
                metrics = TolerantReport(board.add, "metrics of TensorBoard")
                report = _report_both(report, metrics)
        if options.trace:
            steps = steps or Stepper.of(cast(Steppable, module), job.clip_norm, job.tokens)
            _, place = plan.stage_ranks.position(dist.get_rank())
            if place == 0:  # one rank of each stage
                steps = Traced(steps, trace_file(options.trace, dist.get_rank()), device)
        beat = watchdog.beat
        if not train(run, job, device, report, saving, Consensus(ahead), beat, steps):
            _print_from_rank_0(f"stopped by SIGTERM after step {run.step} of {job.last_step}")
        elif options.export:
            write = export_safetensors if options.export.endswith(SUFFIX) else export_pretrained
            write(module, model, options.export)
            _print_from_rank_0(f"weights written to {options.export}")
        if plan.expert_skew and (found := measured_routing(module.skews(), device)) is not None:
            _print_from_rank_0(f"rows of the busiest device over the mean: {found}")
            if dist.get_rank() == 0:
                losses.write(found.line() + "\n")


def _module(
    job: Job, model: nn.Module, plan: Plan, device: torch.device, timeout: timedelta
) -> tuple[ShapeVariants | AsyncTrainable, AsyncLoop | None, int]:
    """The parallel module, its steps (None: `Stepper`), and `Consensus.ahead`, in steps."""
    others, evaluated = job.other_calls(), job.evaluation is not None
    if plan.pipeline is None or plan.pipeline.weights is None:
        many = ShapeVariants(
            model,
            plan,
            others,
            seed=job.seed,
            device=device,
            compiled=job.compiled,
            evaluated=evaluated,
        )
        many.set_timeout(timeout)
        return many, None, 0
    if job.compiled:
        raise PlanError(
            f"schedule {plan.schedule!r} does not run compiled; leave --compile out, or plan"
            " without asynchronous stages"
        )
    pipeline = parallelize(model, plan, seed=job.seed, device=device)
    assert isinstance(pipeline, AsyncPipeline), "the plan is asynchronous"
    module = AsyncTrainable(pipeline, plan, others)
    if evaluated:
        module.check_evaluation()
    return module, AsyncLoop(module, job), 4 * plan.stages


def _resumed(
    run: TrainingState, plan: Plan, steps: int, options: argparse.Namespace
) -> PeriodicSaver:
    """Restore the latest checkpoint, if there is one; return what saves the run."""
    checkpoints = Checkpoints(options.checkpoint, plan, options.keep)
    saved, wrong = checkpoints.resume(run)
    for text in wrong:
        _print_from_rank_0(f"passed over: {text}")
    if saved is not None:
        _print_from_rank_0(f"resumed after step {saved.step} from {saved.folder}")
    if run.step >= steps:
        _print_from_rank_0(f"nothing left to do: {run.step} of {steps} steps are done")

    def say(error: CheckpointError) -> None:
        _print_from_rank_0(str(error))

    return PeriodicSaver(checkpoints, options.every, say, background=not options.wait_for_saves)


def _print_error(text: str) -> None:
    """Print an error, on any rank, because rank 0 may be the one that hangs."""
    print(_shown(text), file=sys.stderr, flush=True)


def _print_from_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        print(_shown(text), flush=True)


@contextmanager
def _appended(path: str) -> Iterator[TextIO]:
    """The file opened to append lines; a last line that a killed rank did not finish is ended."""
    is_cut = Path(path).is_file() and not _ends_a_line(path)
    file = open(path, "a")  # noqa: SIM115  # closed below, where an error must not end the run
    try:
        with suppress(OSError):
            file.write("\n" * is_cut)
        yield file
    finally:
        with suppress(OSError):  # of a full disk, which was printed
            file.close()


def _ends_a_line(path: str) -> bool:
    """Whether a file is empty, or its last character ends a line."""
    with open(path, "rb") as file:
        file.seek(-min(1, os.path.getsize(path)), os.SEEK_END)
        return file.read() in (b"", b"\n")


def _report_both(one: Report, other: Report) -> Report:
    def report(record: StepRecord | EvaluationRecord) -> None:
        one(record)
        other(record)

    return report


def _report_nothing(record: StepRecord | EvaluationRecord) -> None:
    """The report function of ranks other than 0, which does nothing."""


def _seconds(text: str) -> float:
    """A positive number of seconds; argparse reports the `ValueError`."""
    if not 0 < (found := float(text)) < float("inf"):
        raise ValueError(text)
    return found


def parser() -> argparse.ArgumentParser:
    """The parser of the worker's arguments; tests compare launch scripts with it."""
    known = argparse.ArgumentParser(prog="python -m shardwright.train.worker")
    known.add_argument("--target", required=True)
    known.add_argument("--plan", required=True, help="file, or folder of one per device count")
    known.add_argument("--steps", type=int, help="instead of the job's")
    known.add_argument("--losses", required=True, help="file for rank 0's JSON lines")
    known.add_argument("--batch", type=int)
    known.add_argument("--seq", type=int)
    known.add_argument("--set", action="append", default=[], help="NAME=VALUE, of the target")
    known.add_argument("--checkpoint", help="folder to resume from and to save to")
    known.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    known.add_argument("--weights", help="safetensors file or folder to start from")
    known.add_argument("--compile", action="store_true", help="run through torch.compile")
    known.add_argument(
        "--tune-host", action="store_true", help="change how the host runs ranks on CPUs"
    )
    known.add_argument("--tensorboard", help="folder for event files of rank 0")
    known.add_argument("--trace", help="folder for a profile of the third step")
    known.add_argument("--stall-timeout", type=_seconds, default=600.0, help="without a step")
    known.add_argument(
        "--start-timeout", type=_seconds, default=1800.0, help="of a part of a start"
    )
    known.add_argument("--wait-for-saves", action="store_true", help="steps wait for checkpoints")
    known.add_argument("--keep", type=int, default=3, help="how many checkpoints are kept")
    known.add_argument("--export", help="*.safetensors, or a folder for `from_pretrained`")
    return known


if __name__ == "__main__":
    main()
