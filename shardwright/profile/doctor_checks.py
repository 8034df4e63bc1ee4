"""Checks whether this host can run parallel training, and reports failures and missing parts.

The checks install and change nothing. One of them starts ranks, which run a collective.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.machine.backends import backend_on
from shardwright.machine.host_memory import host_bytes
from shardwright.runtime.comm.shutdown import leave
from shardwright.runtime.device import bound, rank_device
from shardwright.runtime.ranks import RanksError, run_ranks

_NEEDED = ("torch", "numpy", "rich", "click")
_EXTRAS = {
    "hf": (("transformers", "safetensors"), "a Hugging Face config.json as a target"),
    "report": (("jinja2", "plotly"), "shardwright report"),
}
_OLDEST_TORCH = (2, 11)
_MESSAGE = 2**24  # bytes of the all-reduce
_TIMEOUT = 120.0  # seconds for the ranks to run it


class CheckState(Enum):
    """The outcome of a check."""

    OK = "ok"
    MISSING = "missing"  # training works without it
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check, with a line of text; `remedy` is advice, or empty."""

    name: str
    state: CheckState
    text: str
    remedy: str = ""


def run_checks(ranks: int | None = None) -> Iterator[CheckResult]:
    """Run all checks in order, the slowest last.

    Args:
        ranks: the number of processes that run a collective; None: one for each GPU, at least two;
            0: that check is skipped.
    """
    yield _python()
    yield from _packages()
    yield _host()
    yield from _gpus()
    yield _backends()
    if ranks != 0:
        yield _ranks(ranks or max(2, torch.cuda.device_count()))


def _python() -> CheckResult:
    return CheckResult(
        "Python", CheckState.OK, f"{platform.python_version()} on {platform.platform()}"
    )


def _packages() -> Iterator[CheckResult]:
    yield CheckResult(
        "shardwright", CheckState.OK, _version("shardwright") or "not installed, run in place"
    )
    for name in _NEEDED:
        yield _package(name, f"pip install {name}")
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        yield CheckResult(
            "torch",
            CheckState.FAILED,
            f"{torch.__version__}, {oldest} is needed",
            "pip install -U torch",
        )
    for extra, (names, purpose) in _EXTRAS.items():
        lacking = [name for name in names if _version(name) is None]
        if lacking:
            text = f"{', '.join(lacking)} not installed, for {purpose}"
            remedy = f"pip install 'shardwright[{extra}]'"
            yield CheckResult(f"extra {extra}", CheckState.MISSING, text, remedy)
        else:
            found = ", ".join(f"{name} {_version(name)}" for name in names)
            yield CheckResult(f"extra {extra}", CheckState.OK, found)


def _package(name: str, remedy: str) -> CheckResult:
    version = _version(name)
    if version is None:
        return CheckResult(name, CheckState.FAILED, "not installed", remedy)
    return CheckResult(name, CheckState.OK, version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _host() -> CheckResult:
    cores = len(os.sched_getaffinity(0))
    memory = host_bytes() / 2**30
    return CheckResult("host", CheckState.OK, f"{cores} cores, {memory:.1f} GiB of memory")


def _gpus() -> Iterator[CheckResult]:
    count = torch.cuda.device_count()
    if count == 0:
        text = "none: plans can be made, verified and tried on processes of this host"
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        remedy = "" if built else "with a GPU here, install a build of torch for it"
        yield CheckResult("GPUs", CheckState.MISSING, text, remedy)
        return
    for index in range(count):
        seen = torch.cuda.get_device_properties(index)
        text = f"{seen.name}, {seen.total_memory / 2**30:.1f} GiB"
        yield CheckResult(f"GPU {index}", CheckState.OK, text)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    if pairs:
        state = CheckState.OK if direct == len(pairs) else CheckState.MISSING
        remedy = (
            "" if direct == len(pairs) else "others go through the host: plan with --machine here"
        )
        yield CheckResult(
            "links", state, f"{direct} of {len(pairs)} pairs of GPUs are direct", remedy
        )


def _backends() -> CheckResult:
    if not dist.is_available():
        return CheckResult(
            "backends",
            CheckState.FAILED,
            "torch has no distributed package",
            "install another build",
        )
    found = ["gloo"] * dist.is_gloo_available() + ["nccl"] * dist.is_nccl_available()
    if torch.cuda.device_count() and "nccl" not in found:
        text = f"{', '.join(found)}, and no nccl for the GPUs"
        return CheckResult(
            "backends", CheckState.FAILED, text, "install a build of torch for these GPUs"
        )
    return CheckResult("backends", CheckState.OK, ", ".join(found))


def _ranks(ranks: int) -> CheckResult:
    name = f"{ranks} ranks"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        try:
            run_ranks("shardwright.profile.doctor_checks", [str(file)], ranks, timeout=_TIMEOUT)
            found = json.loads(file.read_text())
        except (RanksError, OSError) as e:
            line = str(e).strip().splitlines()[-1]
            remedy = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME may name the right network"
            return CheckResult(name, CheckState.FAILED, line, remedy)
    rate = found["bytes"] / found["seconds"] / 1e9
    text = (
        f"meet over {found['backend']}; an all_reduce of {found['bytes'] / 2**20:.0f} MiB takes"
        f" {found['seconds'] * 1e3:.1f} ms, {rate:.2f} GB/s"
    )
    return CheckResult(name, CheckState.OK, text)


def _rank(file: str) -> None:
    """Entry point of one rank: all-reduce ones, check the sum, write the seconds to a file."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    enough = torch.cuda.device_count() >= ranks  # else the ranks of the check run on the CPU
    device = rank_device(int(os.environ["LOCAL_RANK"]), ranks) if enough else torch.device("cpu")
    backend = backend_on(device.type).name
    dist.init_process_group(backend, device_id=bound(device))
    try:
        values = torch.ones(_MESSAGE // 4, device=device)
        dist.all_reduce(values)
        if not bool((values == dist.get_world_size()).all()):
            raise RuntimeError(f"all_reduce over {backend} gives a wrong sum")
        seconds = _best(lambda: dist.all_reduce(values), device)
        if dist.get_rank() == 0:
            found = {"backend": backend, "bytes": _MESSAGE, "seconds": seconds}
            Path(file).write_text(json.dumps(found))
    finally:
        leave()


def _best(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of five runs, in seconds."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    import sys

    _rank(sys.argv[1])
