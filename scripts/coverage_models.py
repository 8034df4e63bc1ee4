"""Measure which models are captured, planned and exact, and write `docs/models.md`.

python scripts/coverage_models.py                      # every model: an hour on two cores
python scripts/coverage_models.py --only vit bert      # these rows anew, the others as they are
python scripts/coverage_models.py --no-verify          # no ranks: without the last column
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import shardwright as sw  # noqa: E402
from shardwright.ir.graph import Graph  # noqa: E402
from shardwright.rules.analysis import analyze  # noqa: E402
from shardwright.rules.rule import Rule  # noqa: E402
from tests.ranks.harness import run_ranks  # noqa: E402
from tests.zoo import ZOO  # noqa: E402
from tests.zoo.tilings import random_tilings  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MACHINE = "8xH100"
MESHES = {2: ["a=2"], 4: ["a=2 b=2"]}
TOLERANCE = 1e-8
HEAD = f"""# Models

Written by `python scripts/coverage_models.py`, from the models of `tests/zoo`.

* *operators*: of the captured training step at the published size, loss included;
* *written*, *found*, *replicated*: the share of operators whose rule is in the tables, was found
  by experiment, or is missing, so that every device computes them whole;
* *split*: the share of the multiply-adds in operators that can be split;
* *planned*: the fastest plan for {MACHINE} at the published size, on the meta device, and what
  it is estimated to take;
* *exact*: the worst error of loss, gradients, buffers and parameters after a step, relative to
  each tensor's largest element, over random tilings at a reduced size in float64, on 2 and on
  2x2 ranks.

"""
COLUMNS = (
    "model",
    "captured",
    "operators",
    "written",
    "found",
    "replicated",
    "split",
    "planned",
    "exact",
)


def main() -> int:
    """Measure the chosen models; status 1 if one is not covered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="NAME")
    parser.add_argument("--no-verify", action="store_true", help="do not start ranks")
    parser.add_argument("--no-plan", action="store_true", help="do not search")
    parser.add_argument("--tilings", type=int, default=10, help="random ones on each mesh")
    options = parser.parse_args()
    quiet()
    rows = read(PAGE)
    failed = []
    for name in options.only:
        try:
            old = rows.get(name, [""] * len(COLUMNS))
            row = [name, *describe(name, None if options.no_plan else MACHINE)]
            if options.no_plan:
                row[7] = old[7]
            row.append(old[8] if options.no_verify else verified(name, options.tilings))
        except Exception as e:  # one model's trouble is a row of the table, not the end of it
            failed.append(name)
            row = [name, f"no: {type(e).__name__}: {str(e).splitlines()[0]}", *[""] * 7]
        rows[name] = row
        print(" | ".join(row), flush=True)
        write(PAGE, rows)
    return bool(failed)


def describe(name: str, machine: str | None) -> list[str]:
    """Captured, counts of operators, shares of rules, and the fastest plan."""
    with torch.device("meta"):
        model, batch = ZOO[name](True)
    start = time.perf_counter()
    graph = sw.capture(model, (), batch)
    seconds = time.perf_counter() - start
    analysis = analyze(graph)
    total, found, missing = len(graph.ops), len(analysis.discovered), len(analysis.unknown)
    row = [
        f"{seconds:.1f} s",
        str(total),
        f"{(total - found - missing) / total:.1%}",
        f"{found / total:.1%}",
        f"{missing / total:.1%}",
        f"{split_share(graph, analysis.rules):.1%}",
    ]
    return [*row, planned(graph, machine) if machine else ""]


def split_share(graph: Graph, rules: dict[str, Rule]) -> float:
    """Share of the multiply-adds in operators of whose work a factor can be split."""
    total = split = 0
    for op in graph.ops:
        rule = rules[op.name]
        work = rule.work_repeats if rule.work else 0
        for name in rule.work:
            work *= rule.factor[name].size
        total += work
        if any(choice is not None and str(choice) in rule.work for choice in rule.choices()):
            split += work
    return split / total if total else 1.0


def planned(graph: Graph, machine: str) -> str:
    """The fastest plan in a few words."""
    start = time.perf_counter()
    plan = sw.search(graph, sw.Machine.preset(machine)).fastest()
    seconds = time.perf_counter() - start
    memory = plan.peak_bytes / 2**30
    return f"{plan.mesh}, {plan.step_seconds * 1e3:.1f} ms, {memory:.1f} GiB (in {seconds:.0f} s)"


def verified(name: str, count: int) -> str:
    """The worst errors on 2 and on 2x2 ranks."""
    worst = []
    for world, meshes in MESHES.items():
        error, where = run_ranks(world, tiled, name, meshes, count, timeout=1800)[0]
        if not error <= TOLERANCE:
            raise AssertionError(f"error {error:.1e} at {where}")
        worst.append(f"{error:.0e}")
    return " / ".join(worst)


def tiled(name: str, meshes: list[str], count: int) -> tuple[float, str]:
    """On one rank: see `random_tilings`."""
    quiet()
    return random_tilings(name, meshes, count)


def read(page: Path) -> dict[str, list[str]]:
    """Rows of an earlier run, by model."""
    lines = page.read_text().splitlines() if page.exists() else []
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in cells if row[0] in ZOO}


def write(page: Path, rows: dict[str, list[str]]) -> None:
    """The page, in the order of the zoo."""
    table = [COLUMNS, ["---"] * len(COLUMNS), *(rows[name] for name in ZOO if name in rows)]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    page.write_text(HEAD + "\n".join(lines) + "\n")


def quiet() -> None:
    """No warnings of the libraries that models come from."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
