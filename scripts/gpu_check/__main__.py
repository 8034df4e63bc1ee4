"""Checks shardwright on the GPU of this host, in ten minutes: exactness, NCCL, predictions.

`python -m scripts.gpu_check --out results.json`. Each check is a process of its own with a limit;
those whose times count run alone, the others beside each other. One that fails ends nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import provenance
from scripts.gpu_check import attention, commands, exact, limited, predicted, ranks, steps
from scripts.gpu_check.models import Found


@dataclass(frozen=True)
class Check:
    """One check: what it calls, its limit in seconds, and whether it must have the GPU alone."""

    run: Callable[[torch.device], Found]
    seconds: float = 120.0
    alone: bool = False


CHECKS = {
    "float64": Check(exact.float64),
    "bf16": Check(exact.bf16),
    "compiled": Check(exact.compiled, 180.0),
    "waits": Check(steps.waits),
    "nccl": Check(ranks.nccl, 240.0),
    "memory": Check(ranks.memory, 180.0),
    "asynchronous": Check(ranks.asynchronous),
    "own loop": Check(commands.own_loop),
    "run": Check(commands.run, 280.0),
    "steps of run": Check(steps.steps_of_run),
    "doctor": Check(commands.doctor),
    "graphs": Check(steps.graphs, alone=True),
    "dropout": Check(steps.dropout, 180.0, alone=True),
    "offloaded": Check(predicted.offloaded, 120.0, alone=True),
    "profiled": Check(commands.profiled, 100.0, alone=True),
    "predicted": Check(predicted.predicted, 300.0, alone=True),
    "limited": Check(limited.limited, 200.0, alone=True),
    "ring": Check(attention.ring, 60.0, alone=True),
    "updates": Check(limited.updates, 60.0, alone=True),
}


def main() -> None:
    """Run the checks, print a line for each, and write all results; exit 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="of a copy of the tree without its history")
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _one(CHECKS[options.one], options.device, options.out)
        return
    names = options.only or list(CHECKS)
    found: dict[str, Any] = {}

    def go(name: str) -> None:
        found[name] = _bounded(name, options.device)
        state = "ok" if "error" not in found[name] else "FAILED " + found[name]["error"][-1500:]
        print(f"{name}: {found[name]['seconds']:.0f} s, {state}", flush=True)
        options.out.write_text(
            json.dumps({**_where(options.commit), "checks": found}, indent=1) + "\n"
        )

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(go, (name for name in names if not CHECKS[name].alone)))
    for name in names:
        if CHECKS[name].alone:
            go(name)
    sys.exit(any("error" in one for one in found.values()))


def _bounded(name: str, device: str) -> dict[str, Any]:
    """The results of a check in a process of its own, with what is wrong with them."""
    start, error = time.perf_counter(), ""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "scripts.gpu_check", "--one", name]
        command += ["--device", device, "--out", str(out)]
        # In a session of its own, so that its ranks end with it.
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=CHECKS[name].seconds)
                error = said[-4000:] if process.returncode else ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
                error = f"not done in {CHECKS[name].seconds} s: {said[-3000:]}"
        result = json.loads(out.read_text()) if out.exists() else {"result": {}, "wrong": {}}
    wrong = result.pop("wrong")
    result["seconds"] = round(time.perf_counter() - start, 1)
    if wrong or error:
        result["error"] = "; ".join((*(f"{what}: {why}" for what, why in wrong.items()), error))
    return result


def _one(check: Check, device: str, out: Path) -> None:
    """Run a check here; what it has found is written as it goes."""
    found: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for what, figures, why in check.run(torch.device(device)):
        found[what] = figures
        if why:
            wrong[what] = why
        out.write_text(json.dumps({"result": found, "wrong": wrong}))


def _where(commit: str) -> dict[str, Any]:
    """Where the results are from."""
    known = provenance(0)
    known["commit"] = known["commit"] or commit
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return known


if __name__ == "__main__":
    main()
