"""What torchrun starts on every rank: join the others, build the parallel module, train.

`python -m shardwright.train.worker --target … --plan … --steps … --losses …`
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console

from shardwright.ir.plan import Plan, PlanError
from shardwright.runtime.batch import BatchError
from shardwright.runtime.shapes import ManyShapes
from shardwright.train.checkpoint import Checkpoints
from shardwright.train.job import Job, JobError
from shardwright.train.loop import (
    EvaluationRecord,
    Saving,
    StepRecord,
    read_own_samples,
    reporter,
    start,
    train,
)
from shardwright.train.randomness import seed_all
from shardwright.train.reading import CheckpointError
from shardwright.train.state import Run
from shardwright.train.step import NonFiniteLossError
from shardwright.train.target import build_model, load_job
from shardwright.train.values import ValueFormatError

_MISTAKES = (
    BatchError,
    CheckpointError,
    JobError,
    NonFiniteLossError,
    PlanError,
    ValueFormatError,
)
_TIMEOUT = timedelta(minutes=10)  # of one collective; a rank that waits longer has lost its peers


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank to the end of its steps."""
    options = _parser().parse_args(argv)
    job = load_job(options.target, options.batch, options.seq, options.set)
    plan = Plan.load(options.plan)
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        _train(job, plan, device, options)
    except _MISTAKES as e:
        sys.exit(f"shardwright: {e}" if dist.get_rank() == 0 else 1)
    finally:
        dist.destroy_process_group()


def _train(job: Job, plan: Plan, device: torch.device, options: argparse.Namespace) -> None:
    others = job.other_calls()
    module = ManyShapes(build_model(job), plan, others, seed=job.seed, device=device)
    if job.evaluation is not None:
        module.check_evaluation()
    seed_all(job.seed)
    run = start(module, job)
    read_own_samples(run, job)
    saving = _resumed(run, plan, options) if options.checkpoint else None
    with ExitStack() as stack:
        report: Callable[[StepRecord | EvaluationRecord], None] = _silent
        if dist.get_rank() == 0:
            losses = stack.enter_context(open(options.losses, "a"))
            report = stack.enter_context(reporter(options.steps, losses, Console()))
        train(run, job, options.steps, device, report, saving)


def _resumed(run: Run, plan: Plan, options: argparse.Namespace) -> Saving:
    """How to save the run, which is at the latest checkpoint from here on if there is one."""
    checkpoints = Checkpoints(options.checkpoint, plan, options.keep)
    saved, wrong = checkpoints.resume(run)
    for text in wrong:
        _say(f"passed over: {text}")
    if saved is not None:
        _say(f"resumed after step {saved.step} from {saved.folder}")
    if run.step >= options.steps:
        _say(f"nothing left to do: {run.step} of {options.steps} steps are done")
    return Saving(checkpoints, options.every, lambda error: _say(str(error)))


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"shardwright: {text}", flush=True)


def _silent(record: StepRecord | EvaluationRecord) -> None:
    """What ranks other than 0 report."""


def _device() -> torch.device:
    """This rank's GPU where the host has one for every rank on it, else the CPU."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardwright.train.worker")
    parser.add_argument("--target", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--losses", required=True, help="file for rank 0's JSON lines")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, of the target")
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=3, help="how many checkpoints are kept")
    return parser


if __name__ == "__main__":
    main()
