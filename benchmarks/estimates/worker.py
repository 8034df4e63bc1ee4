"""One of the ranks that take the steps: all plans of a model in turn, so that noise hits all.

Their order changes from round to round.

torchrun starts it; rank 0 writes what was measured, in the order of the plans.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from benchmarks.estimates.models import MODELS
from benchmarks.record import TUNE_HOST
from shardwright.profile.host_load import HostLoad
from shardwright.profile.timing import of_these_cores
from shardwright.runtime.comm.shutdown import leave
from shardwright.runtime.parameters.peak_memory import metered, tensors_of

SEED = 0
LEAST_ROUNDS = 3
METERED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan as one rank ran it.

    Wall seconds of each step, CPU seconds of its main thread, and bytes of tensors in one, the
    median of three, as Gloo's threads now and then let go of what they sent a moment late, or 0 if
    they were not counted; `busy` is the part of this rank's cores that other programs than the
    ranks took meanwhile.
    """

    seconds: tuple[float, ...]
    thread_seconds: tuple[float, ...]
    bytes: int
    busy: float


def main() -> None:
    """Take steps of all plans in turn, as many rounds as fit."""
    options = _options()
    dist.init_process_group("gloo")
    try:
        plans = [sw.Plan.from_json(text) for text in json.loads(options.plans.read_text())]
        mine = _measured(plans, options)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [asdict(one) for one in mine])
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(every))
        dist.barrier()
    finally:
        leave()


def _measured(plans: list[sw.Plan], options: argparse.Namespace) -> list[Measured]:
    torch.manual_seed(SEED)
    make = MODELS[options.model]
    model, batch = make() if options.batch is None else make(options.batch)
    shuffled = random.Random(options.order)  # the same on every rank
    subjects: list[Any] = [None] * len(plans)
    for place in shuffled.sample(range(len(plans)), len(plans)):
        module = sw.parallelize(model, plans[place], tune_host=TUNE_HOST)
        optimizer = torch.optim.AdamW(module.parameters())
        module.train_step(optimizer, batch)  # makes the optimizer's state
        subjects[place] = module, optimizer
    held = [0] * len(plans)
    if options.count_memory:
        held = [_metered(module, optimizer, batch) for module, optimizer in subjects]
    wall: list[list[float]] = [[] for _ in subjects]
    thread: list[list[float]] = [[] for _ in subjects]
    watched, ours, end = HostLoad(), time.process_time(), time.monotonic() + options.seconds
    for number in range(options.rounds):
        if number >= LEAST_ROUNDS and _late(end):
            break
        # What ran before leaves caches and heap as it does; no plan always follows the same one.
        for place in shuffled.sample(range(len(subjects)), len(subjects)):
            module, optimizer = subjects[place]
            dist.barrier()
            start, computed = time.perf_counter(), time.thread_time()
            module.train_step(optimizer, batch).item()
            wall[place].append(time.perf_counter() - start)
            thread[place].append(time.thread_time() - computed)
    busy = watched.used_by_others(of_these_cores(time.process_time() - ours))
    return [
        Measured(tuple(seconds), tuple(cpu), size, busy)
        for seconds, cpu, size in zip(wall, thread, held, strict=True)
    ]


def _late(end: float) -> bool:
    """Whether rank 0's time is up."""
    late = torch.tensor([float(time.monotonic() > end)])
    dist.broadcast(late, 0)
    return bool(late.item())


def _metered(module: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> int:
    given = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    found = []
    for _ in range(METERED_STEPS):
        optimizer.zero_grad(set_to_none=True)
        held = [*module.parameters(), *module.buffers(), *tensors_of(optimizer), *given]
        step = partial(module.train_step, optimizer, batch)
        found.append(metered(step, held, torch.device("cpu"))[1])
    return statistics.median_low(found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--batch", type=int, help="samples of a step; the model's own if missing")
    parser.add_argument("--plans", type=Path, required=True, help="JSON list of plans' texts")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="for all steps")
    parser.add_argument("--order", type=int, default=0, help="seed of the order in each round")
    parser.add_argument(
        "--count-memory", action="store_true", help="in steps before the timed ones"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
