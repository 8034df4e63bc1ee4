"""The commands and the documented loop, as a user runs them on a host with one GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check.models import Found
from scripts.gpu_check.predicted import MEASURED, kind_here
from shardwright.machine.files.toml import to_toml
from shardwright.profile.measure import measure_host

ROOT = Path(__file__).parents[2]


def profiled(device: torch.device) -> Found:
    """Measures this GPU, as `shardwright profile` does, and writes the machine file."""
    machine = measure_host(1, 20.0, anew=True)
    Path(MEASURED).write_text(to_toml(machine))
    yield "machine", to_toml(machine), ""


def own_loop(device: torch.device) -> Found:
    """The script of docs/how-to/own-loop.md under torchrun."""
    text = (ROOT / "docs/how-to/own-loop.md").read_text()
    found = re.search(r'```python title="train.py"\n(.*?)```', text, re.S)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(found[1])
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        yield _run([*launcher, str(script)])


def run(device: torch.device) -> Found:
    """`shardwright run` of the example on one device, with verification; then it is resumed.

    After that come the seconds of imports, with which each of its processes begins.
    """
    with tempfile.TemporaryDirectory() as folder:
        for steps, verifies in (("40", "--verify"), ("60", "--no-verify")):
            options = ["--devices", "1", "--steps", steps, "--checkpoint", folder, verifies]
            options += ["--machine", f"1x{kind_here()}"]
            _, figures, wrong = _run(
                ["-m", "shardwright", "run", "examples/bytes_gpt.py:job", *options]
            )
            yield f"to step {steps}, {verifies}", figures, wrong
    for module in ("torch", "shardwright.train.worker", "transformers.models.gpt2.modeling_gpt2"):
        _, figures, wrong = _run(["-c", f"import {module}"])
        yield f"import {module}", figures, wrong


def doctor(device: torch.device) -> Found:
    """`shardwright doctor`."""
    yield _run(["-m", "shardwright", "doctor"])


def _run(arguments: list[str]) -> tuple[str, dict[str, Any], str]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    seconds, output = round(time.perf_counter() - start, 1), (done.stdout + done.stderr)[-6000:]
    wrong = f"exit {done.returncode}: {output}" if done.returncode else ""
    return " ".join(arguments[:3]), {"seconds": seconds, "output": output}, wrong
