"""What torchrun starts on every rank: join the others, build the parallel module, train.

`python -m shardwright.train.worker --target … --plan … --steps … --losses …`
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console

from shardwright.ir.plan import Plan
from shardwright.runtime.parallel import parallelize
from shardwright.train.job import Job
from shardwright.train.loop import reporter, train
from shardwright.train.target import build_model, load_job

_TIMEOUT = timedelta(minutes=10)  # of one collective; a rank that waits longer has lost its peers


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank to the end of its steps."""
    options = _parser().parse_args(argv)
    job = load_job(options.target, options.batch, options.seq, options.set)
    plan = Plan.load(options.plan)
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        _train(job, plan, options.steps, device, options.losses)
    finally:
        dist.destroy_process_group()


def _train(job: Job, plan: Plan, steps: int, device: torch.device, losses: str) -> None:
    module = parallelize(build_model(job), plan, seed=job.seed, device=device)
    if dist.get_rank() != 0:
        train(module, job, steps, device, lambda record: None)
        return
    with open(losses, "w") as file, reporter(steps, file, Console()) as report:
        train(module, job, steps, device, report)


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
    return parser


if __name__ == "__main__":
    main()
