"""A small version of each comparison, one after the other: what `make benchmarks-quick` runs.

    python -m benchmarks.quick                  # about four minutes on two cores
    python -m benchmarks.quick tapas soybean

Results go to `build/benchmarks`, never over committed ones. Each comparison prints what it found;
a failed one or one that takes too long does not stop the others, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import ROOT

FOLDER = ROOT / "build" / "benchmarks"
LIMIT_SECONDS = 240.0  # of one comparison; idle, none takes a quarter of it
_DATA = ("--strategies", "data parallel")
# By folder. The result's file is added; a comparison without `-o` writes none of so few steps.
QUICK: dict[str, tuple[str, ...]] = {
    "efficiency": (
        *_DATA,
        *["--models", "mlp", "vgg", "--rounds", "10", "--seconds", "0", "--no-compiled", "-o"],
    ),
    "tensoropt": ("--quick", "-o"),
    "soybean": ("--quick", "--fresh", "-o"),
    "soybean_cuts": ("--models", "MLP of 4 x 8192, batch 512", "-o"),
    "tapas": ("--quick", "--repeats", "1", "-o"),
    "search": ("--models", "vgg16", "--devices", "--repeats", "1", "-o"),
    "spectrain_equality": ("--steps", "5", "--stages", "2"),
    "spectrain_speed": ("--quick",),
    "dropout": ("--repeats", "3", "--layers", "1", "--out"),
    "overhead": ("--repeats", "3", "--models", "mlp", "--out"),
}


def ran(name: str) -> str:
    """Run the small version of a comparison; what went wrong, if anything did."""
    options = QUICK[name]
    file = [str(FOLDER / f"{name}.json")] if options[-1] in ("-o", "--out") else []
    command = [sys.executable, "-m", f"benchmarks.{name}.run", *options, *file]
    start = time.monotonic()
    print(f"=== {name}: {' '.join(command[1:])}", flush=True)
    try:
        done = subprocess.run(command, cwd=ROOT, env=os.environ, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{name} took more than {LIMIT_SECONDS:g} s"
    print(f"=== {name} took {time.monotonic() - start:.0f} s", flush=True)
    return f"{name} ended with status {done.returncode}" if done.returncode else ""


def main() -> None:
    """Run them, say which failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(QUICK))
    parser.add_argument("--part", default="1/1", help="1/3: every third of them alone")
    options = parser.parse_args()
    first, parts = map(int, options.part.split("/"))
    names = (options.names or list(QUICK))[first - 1 :: parts]
    if unknown := sorted(set(names) - set(QUICK)):
        parser.error(f"no small version of {', '.join(unknown)}; there are {', '.join(QUICK)}")
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    if failed := [wrong for name in names if (wrong := ran(name))]:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
