"""TensorOpt's claim: the system adapts to the resources there are.

    python -m benchmarks.tensoropt.run -o benchmarks/tensoropt/result.json

One model, 1 to 4 ranks: the frontier of time against memory on each number, and runs under falling
limits of memory, which the kernel enforces (`worker.py`): DDP, FSDP2, and our fastest plan that
is predicted to fit. A limit at which no plan fits is told with the least that would do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

import shardwright as sw
from benchmarks import record
from benchmarks.tensoropt.worker import ALLOWANCE, OURS, WRAPPERS, Task, came_through, made, run
from shardwright.plan_io.plan_text import plan_to_json

SEED = 0
MIB = 2**20
LIMITS_MIB: dict[int, tuple[int, ...]] = {  # of a rank, falling, by the number of ranks
    1: (256, 192, 160, 144),
    2: (256, 160, 112, 84),
    3: (224, 144, 88, 64),
    4: (208, 128, 72, 52),
}
QUICK: dict[int, tuple[int, ...]] = {2: (256, 84)}
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a step of the slowest rank, or why there are none."""

    seconds: float | None = None
    failed: str = ""

    def __str__(self) -> str:
        return self.failed if self.seconds is None else f"{self.seconds * 1e3:.0f} ms"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of each contestant on so many ranks under one limit."""

    ranks: int
    limit_bytes: int
    outcomes: dict[str, Outcome]
    predicted_bytes: int | None = None
    predicted_seconds: float | None = None

    def __str__(self) -> str:
        found = ", ".join(f"{name} {outcome}" for name, outcome in self.outcomes.items())
        return f"{self.ranks} ranks, {self.limit_bytes / MIB:g} MiB: {found}"


def frontiers(ranks: Sequence[int]) -> dict[int, sw.Frontier]:
    """Of the model, on each number of ranks."""
    model, batch = made()
    graph = sw.capture(model, (), batch)
    return {
        count: sw.search(
            graph,
            sw.Machine.preset(f"{count}xcpu"),
            optimizer="adamw",
            micro_batches=MICRO_BATCHES,
        )
        for count in ranks
    }


def trained(task: Task) -> list[Outcome]:
    """What becomes of a contestant under each limit: once out of memory, it does not come back."""
    why = ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(run, (task, folder), nprocs=task.ranks)
        except ProcessRaisedException as e:
            if "allocate memory" not in str(e) and "bad_alloc" not in str(e):
                raise
            why = "out of memory"
        except ProcessExitedException as e:  # a thread that torch does not look after
            why = f"died of {e.signal_name or e.exit_code}"
        found = came_through(folder, range(task.ranks))
    done = []
    for by_rank in found:
        slowest = [max(step) for step in zip(*by_rank, strict=True)]
        done.append(Outcome(statistics.median(slowest)))
    if why and not done:
        print(f"tensoropt: {task.name} on {task.ranks}: {why} at once", file=sys.stderr)
    return done + [Outcome(failed=why)] * (len(task.limits) - len(done))


def rows(frontier: sw.Frontier, ranks: int, limits: Sequence[int], steps: int) -> list[Row]:
    """All contestants under all limits, on one number of ranks."""
    found: dict[str, list[Outcome]] = {}
    for name in tuple(WRAPPERS) if ranks > 1 else ():
        found[name] = trained(Task(name, ranks, "", tuple(limits), steps))
    plans: list[sw.Plan | None] = []
    ours: list[Outcome] = []
    for limit in limits:
        try:
            plan = frontier.fastest(memory_limit=limit)
        except ValueError as e:  # no plan fits, and it says what would
            plans.append(None)
            ours.append(Outcome(failed=str(e).splitlines()[0]))
            continue
        plans.append(plan)
        ours += trained(Task(OURS, ranks, plan_to_json(plan), (limit,), steps))
    found[OURS] = ours
    return [
        Row(
            ranks,
            limit,
            {name: outcomes[place] for name, outcomes in found.items()},
            plan.peak_bytes if plan else None,
            plan.step_seconds if plan else None,
        )
        for place, (limit, plan) in enumerate(zip(limits, plans, strict=True))
    ]


def main() -> None:
    """Measure all rows, print a line each, write the result after each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="2 ranks, two limits")
    parser.add_argument("--ranks", type=int, nargs="+", choices=LIMITS_MIB)
    parser.add_argument("--limits-mib", type=int, nargs="+", help="falling")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    asked = QUICK if options.quick else LIMITS_MIB
    asked = {ranks: options.limits_mib or asked[ranks] for ranks in options.ranks or asked}
    # One heap a process, and large blocks of their own: what is freed does not count any more.
    os.environ.update(OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536")
    found = frontiers(list(asked))
    points = {
        str(count): [
            {"step_seconds": plan.step_seconds, "peak_bytes": plan.peak_bytes} for plan in frontier
        ]
        for count, frontier in found.items()
    }
    result: dict[str, Any] = {"allowance_bytes": ALLOWANCE, "frontiers": points, "rows": []}
    for ranks, limits in asked.items():
        done = rows(found[ranks], ranks, [limit * MIB for limit in limits], options.steps)
        print(*done, sep="\n", flush=True)
        result["rows"] += [asdict(row) for row in done]
        record.write(result, options.output, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()
