"""What every result says about where it comes from: machine, versions, commit, command, seed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Ranks of comparisons tune the host (`sw.parallelize`), and so do those beside ours, as all are in
# the same processes; a result says whether its ranks did.
TUNE_HOST = True
_PACKAGES = ("torch", "numpy", "scipy", "transformers")


def provenance(seed: int, file: Path | None = None, *, tuned: bool = False) -> dict[str, Any]:
    """Where and with what a result is measured, that is or will be in `file`.

    `tuned` says whether ranks tuned the host; what has no ranks has not.
    """
    name = "" if file is None else os.path.relpath(file.resolve(), ROOT)
    return {
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "commit": commit(),
        # A result that goes on where it was is changed itself.
        "changed_files": sum(
            line.split(maxsplit=1)[1] != name for line in _git("status", "--porcelain").splitlines()
        ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seed": seed,
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "load_at_start": round(os.getloadavg()[0], 2),
            "tuned_host": tuned,
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def commit() -> str:
    """The commit that is checked out."""
    return _git("rev-parse", "HEAD")


def tree(folder: str) -> str:
    """The hash of a folder's content as it is committed."""
    return _git("rev-parse", f"HEAD:{folder}")


def write(result: dict[str, Any], path: Path, seed: int, *, tuned: bool = False) -> None:
    """The result with its provenance, as JSON; `tuned` as in `provenance`."""
    content = {**provenance(seed, path, tuned=tuned), **result}
    path.write_text(json.dumps(content, indent=2) + "\n")


def rows_of_this_commit(path: Path) -> list[dict[str, Any]]:
    """The rows of a result, if there is one, that say that they were made at this commit."""
    if not path.exists():
        return []
    here = commit()
    return [row for row in json.loads(path.read_text())["rows"] if row["commit"] == here]


def digest(shown: Any) -> str:
    """What a picture names as its source: a hash of the part of a result that it shows."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(*args: str) -> str:
    """What git says; nothing in a copy without history, or where git is not installed."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
