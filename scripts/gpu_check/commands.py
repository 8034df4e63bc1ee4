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

from scripts.gpu_check.predicted import MEASURED
from shardwright.machine.toml import to_toml
from shardwright.profile.measure import measure_host

ROOT = Path(__file__).parents[2]


def profiled(device: torch.device) -> dict[str, Any]:
    """Measures this GPU, as `shardwright profile` does, and writes the machine file."""
    machine = measure_host(1, 20.0, anew=True)
    Path(MEASURED).write_text(to_toml(machine))
    return {"machine": to_toml(machine)}


def own_loop(device: torch.device) -> dict[str, Any]:
    """The script of docs/how-to/own-loop.md under torchrun."""
    text = (ROOT / "docs/how-to/own-loop.md").read_text()
    found = re.search(r'```python title="train.py"\n(.*?)```', text, re.S)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(found[1])
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        return _run([*launcher, str(script)])


def run(device: torch.device) -> dict[str, Any]:
    """`shardwright run` of the example on one device, with verification."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--devices", "1", "--steps", "30", "--checkpoint", folder]
        return _run(["-m", "shardwright", "run", "examples/bytes_gpt.py:job", *options])


def doctor(device: torch.device) -> dict[str, Any]:
    """`shardwright doctor`."""
    return _run(["-m", "shardwright", "doctor"])


def _run(arguments: list[str]) -> dict[str, Any]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    output = (done.stdout + done.stderr)[-6000:]
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {output}")
    return {"seconds": round(time.perf_counter() - start, 1), "output": output}
