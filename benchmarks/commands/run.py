"""Wall time of whole `shardwright plan` commands, of this commit and of an earlier one.

    python -m benchmarks.commands.run -o benchmarks/commands/result.json

Each command is a new process. `first` has an empty cache of captures, `next` the one that the first
has left, and `limited` is that with `--seconds 10`; the earlier commit has no cache. Both commits
take turns. `imports` is what Python takes
to import torch and a transformers model alone. Reported are medians of wall and processor seconds,
and the largest resident memory. A command that takes longer than `--limit` seconds is ended and has
no time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.public_models import CONFIGS
from benchmarks.work_tree import work_tree
from shardwright.plan_io.files import load_plan

BEFORE = "83c3193"
LIMIT = 300.0
SECONDS = 10  # the time limit of a search of `limited`
_IMPORTS = "import torch; from transformers import LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class Case:
    """A command that is measured.

    Attributes:
        model: of `CONFIGS`.
        machine: the preset.
        batch: sequences of a step on all devices.
        tokens: of a sequence.
        aim: wall seconds at most; None without one.
        change: fields of the configuration that differ from the published ones.
    """

    model: str
    machine: str
    batch: int
    tokens: int
    aim: float | None = None
    change: tuple[tuple[str, int], ...] = ()


CASES = {
    "8B on 64": Case("Llama-3.1-8B", "8x8xH100", 64, 4096),
    "8B on 8, tight": Case("Llama-3.1-8B", "8xH100", 64, 4096, 15),
    "T5-base on 8": Case("T5-base", "8xH100", 64, 512, 5),
    "4 layers on 64": Case("Llama-3.1-8B", "8x8xH100", 64, 4096, None, (("num_hidden_layers", 4),)),
    "128 layers on 64": Case(
        "Llama-3.1-8B", "8x8xH100", 64, 4096, None, (("num_hidden_layers", 128),)
    ),
    "30B-A3B on 32": Case("Qwen3-30B-A3B", "4x8xH100", 64, 4096, 8),
    "70B on 512": Case("Llama-3.1-70B", "64x8xH100", 512, 4096, 15),
    "DeepSeek-V3 on 256": Case("DeepSeek-V3", "32x8xH100", 1024, 4096, 15),
    "235B-A22B on 256": Case("Qwen3-235B-A22B", "32x8xH100", 1024, 4096, 15),
    "GLM-4.5 on 256": Case("GLM-4.5", "32x8xH100", 1024, 4096, 15),
    "405B on 16,384": Case("Llama-3.1-405B", "2048x8xH100", 2048, 8192, 30),
    "DeepSeek-V3 on 16,384": Case("DeepSeek-V3", "2048x8xH100", 8192, 4096, 30),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One process: wall and processor seconds, peak resident GiB and exit status."""

    wall_seconds: float
    cpu_seconds: float
    peak_gib: float
    status: int


# What runs of this commit are given, in their order.
_NOW: Mapping[str, Sequence[str]] = {
    "first": (),
    "next": (),
    "limited": ("--seconds", str(SECONDS)),
}


def timed(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, limit: float
) -> Run | None:
    """Run a command to its end; None if it takes more than `limit` seconds."""
    start = time.monotonic()
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=folder, stdout=out, stderr=out
        )
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.monotonic() - start
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            used = usage.ru_utime + usage.ru_stime
            return Run(seconds, used, usage.ru_maxrss / 2**20, process.returncode)
        if seconds > limit:
            process.kill()
            process.wait()
            return None
        time.sleep(0.01)


def plan_command(case: Case, config: Path) -> list[str]:
    """`shardwright plan` of a case."""
    sizes = ["--machine", case.machine, "--batch", str(case.batch), "--seq", str(case.tokens)]
    return [sys.executable, "-m", "shardwright", "plan", str(config), *sizes]


def measure(
    name: str, trees: Mapping[str, Path], rounds: int, before_rounds: int, limit: float
) -> dict[str, Any]:
    """One row: all runs of a case by what they are (`before`, `first`, `next`, `limited`).

    `step` has the step seconds of the plans that the last two have found.
    """
    case = CASES[name]
    runs: dict[str, list[Run | None]] = {"before": [], "first": [], "next": [], "limited": []}
    steps: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        config = folder / "config.json"
        command = plan_command(case, config)
        written = folder / "plan.json"
        config.write_text(json.dumps({**CONFIGS[case.model], **dict(case.change)}))
        for turn in range(max(rounds, before_rounds)):
            if turn < before_rounds and runs["before"] != [None]:
                environment = {"PYTHONPATH": str(trees["before"])}
                runs["before"].append(timed(command, environment, folder, limit))
            if turn < rounds:
                cache = folder / f"cache{turn}"
                environment = {"PYTHONPATH": str(trees["now"]), "XDG_CACHE_HOME": str(cache)}
                for which, more in _NOW.items():
                    written.unlink(missing_ok=True)
                    every = [*command, "-o", str(written), *more]
                    runs[which].append(timed(every, environment, folder, limit))
                    if written.exists():
                        steps[which] = load_plan(written).step_seconds
    row = {**asdict(case), "name": name, "step": steps}
    row["change"] = dict(case.change)
    return {**row, **{which: summary(found) for which, found in runs.items() if found}}


def summary(runs: Sequence[Run | None]) -> dict[str, Any]:
    """Medians of the runs that ended, and their exit status."""
    ended = [one for one in runs if one is not None]
    if not ended:
        return {"ended": 0}
    return {
        "ended": len(ended),
        "wall_seconds": round(statistics.median(one.wall_seconds for one in ended), 2),
        "cpu_seconds": round(statistics.median(one.cpu_seconds for one in ended), 2),
        "peak_gib": round(max(one.peak_gib for one in ended), 2),
        "status": max(one.status for one in ended),
    }


def main() -> None:
    """Measure all commands, or those that are named, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before-rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a command")
    options = parser.parse_args()
    rows = []
    with ExitStack() as opened:
        trees = {"now": record.ROOT}
        if options.before_rounds:
            trees["before"] = opened.enter_context(work_tree(options.before))
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        alone = [sys.executable, "-c", _IMPORTS]
        found = [timed(alone, {}, folder, options.limit) for _ in range(1 + options.rounds)]
        imports = summary(found[1:])
        print(f"imports: {imports}", flush=True)
        for name in options.only:
            row = measure(name, trees, options.rounds, options.before_rounds, options.limit)
            print({key: row.get(key) for key in ("name", "before", *_NOW, "step")}, flush=True)
            rows.append(row)
    result = {"before": options.before, "limit": options.limit, "imports": imports, "rows": rows}
    if options.output is not None:
        record.write(result, options.output, 0)


if __name__ == "__main__":
    main()
