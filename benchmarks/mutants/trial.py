"""Runs tests in forked processes, with a change of one module.

The parent has loaded torch and what the tests need; a change of a function's body replaces the code
of the loaded function, any other change has the module loaded from changed source. Processes that
a test starts load it so in any case (`site/sitecustomize.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from benchmarks.mutants.mutant import Mutant
from benchmarks.record import ROOT

SITE = ROOT / "benchmarks" / "mutants" / "site"
OPTIONS = [
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--hypothesis-profile",
    "mutants",
    "--doctest-modules",
    "--assert=plain",  # else a module that is given for its examples is loaded as it is
]
BROKEN = 99  # the exit status if the trial itself failed
MEMORY = 16 * 2**30  # of address space
HEAVY = (
    "torch",
    "torch.distributed.tensor",
    "torch.export",
    "transformers",
    "hypothesis",
    "scipy.optimize",
)


class Task(NamedTuple):
    """Something that a forked process runs; its exit status is what `run` returns."""

    name: str
    run: Callable[[], int]


def load_libraries() -> None:
    """Import what takes long and is not changed."""
    from hypothesis import Phase, settings

    for name in HEAVY:
        importlib.import_module(name)
    kept = Phase.explicit, Phase.generate  # a failure is enough: no smaller one is searched for
    settings.register_profile(
        "mutants", derandomize=True, deadline=None, database=None, phases=kept
    )


def load_package() -> None:
    """Import all modules of the package."""
    for file in sorted((ROOT / "shardwright").rglob("*.py")):
        if file.name not in ("__main__.py", "__init__.py"):
            importlib.import_module(_module(str(file.relative_to(ROOT))))


def outcomes(
    tasks: list[Task], jobs: int, seconds: float
) -> Iterator[tuple[Task, int | None, float]]:
    """Exit status and CPU seconds of each task, as they end.

    The status is None for a task that ran longer than `seconds`, and negative for a signal.
    """
    waiting, running = [*tasks], dict[int, tuple[Task, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            running[_fork(task)] = task, time.monotonic() + seconds
        time.sleep(0.02)
        for pid, (task, end) in [*running.items()]:
            done, status, used = os.wait4(pid, os.WNOHANG)
            late = not done and time.monotonic() > end
            if done or late:
                del running[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what it has started
                if late:
                    _, _, used = os.wait4(pid, 0)
                code = None if late else os.waitstatus_to_exitcode(status)
                yield task, code, used.ru_utime + used.ru_stime


def _fork(task: Task) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = BROKEN
    try:
        os.setpgid(0, 0)
        status = task.run()
    except Exception:  # a fork must end here, with the status that says so
        traceback.print_exc()
    finally:
        os._exit(status)


class _First:
    """A pytest plugin that runs some tests before all others, and keeps who failed."""

    def __init__(self, tests: list[str]) -> None:
        self.place = {test: i for i, test in enumerate(tests)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.place.get(item.nodeid, len(self.place)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def try_tests(
    mutant: Mutant | None,
    first: list[str],
    files: list[str],
    out: Path,
    cpu: float,
    *,
    loaded: bool,
) -> int:
    """Run the tests of `files` against a mutant, the `first` ones first, until one fails.

    Without a mutant the package is as it is. The result is pytest's exit status; `out` gets who
    failed. `loaded` says whether this process has loaded the package.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))
    silence(out.with_suffix(".log"))
    if mutant is not None:
        _put_in(mutant, out.with_suffix(".py"), loaded=loaded)
    plugin = _First(first)
    status = int(pytest.main([*OPTIONS, *files], plugins=[plugin]))
    out.write_text(json.dumps({"status": status, "by": plugin.failed}))
    return status


def _put_in(mutant: Mutant, source: Path, *, loaded: bool) -> None:
    """Change the package in this process and in those that it starts; `source` gets the module."""
    source.write_text(mutant.source())
    os.environ["MUTANT"] = json.dumps(
        {"module": _module(mutant.path), "path": str(ROOT / mutant.path), "source": str(source)}
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])
    if loaded:
        assert exchange(mutant), "no loaded function has the changed code"
    else:
        sys.path.insert(0, str(SITE))
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def silence(log: Path) -> None:
    """Write what this process prints to a file."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def exchange(mutant: Mutant) -> int:
    """Give the loaded functions of a module their changed code; how many changed."""
    path = str(ROOT / mutant.path)
    old = _codes(compile((ROOT / mutant.path).read_text(), path, "exec", dont_inherit=True))
    new = _codes(compile(mutant.source(), path, "exec", dont_inherit=True))
    changed = {key for key, code in new.items() if old.get(key) != code}
    count = 0
    for found in gc.get_objects():
        if isinstance(found, FunctionType) and found.__code__.co_filename == path:
            key = _key(found.__code__)
            if key in changed:
                found.__code__ = new[key]
                count += 1
    return count


def _codes(code: CodeType) -> dict[Any, CodeType]:
    found = {_key(code): code}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _codes(inner)
    return found


def _key(code: CodeType) -> Any:
    return code.co_qualname, code.co_firstlineno


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
