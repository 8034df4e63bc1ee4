"""Plans of giant models for 256 GPUs on 32 hosts, beside a strategy of a framework.

    python -m benchmarks.giants.run -o benchmarks/giants/result.json

Each row is a new process of `shardwright plan --json` with an empty cache of captures, and one of
`shardwright price` for each strategy of `models.GIANTS`. Rows that the same package made are kept;
a result is written after each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.commands.run import Run, timed
from benchmarks.giants.models import GIANTS, Giant
from shardwright.ir.plan import Plan
from shardwright.machine.presets import preset
from shardwright.plan_io.files import load_plan
from shardwright.planner.axes.plan_roles import axis_uses
from shardwright.report.accuracy import verdict
from shardwright.report.headline import headline

MACHINE = "32x8xH100"
LIMIT = 1800.0
_SOME = 0.05  # of an axis' compute time


def main() -> None:
    """Plan all models, or those that are named, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(GIANTS), default=list(GIANTS))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a command")
    options = parser.parse_args()
    package = record.tree("shardwright")
    known = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    rows = {row["name"]: row for row in known}
    for name in options.only:
        before = rows.get(name, {})
        before = before if before.get("package") == package else {}
        rows[name] = row(name, options.limit, before)
        if rows[name] == before:
            continue
        rows[name] |= {"package": package, "commit": record.commit()}
        print(rows[name], flush=True)
        ordered = [rows[each] for each in GIANTS if each in rows]
        record.write({"preset": MACHINE, "rows": ordered}, options.output, 0)


def row(name: str, limit: float, before: dict[str, Any]) -> dict[str, Any]:
    """What was planned for a model, what the commands took, and prices of other strategies.

    What `before` has is not computed again.
    """
    one = GIANTS[name]
    found: dict[str, Any] = {**before, "name": name, "batch": one.batch, "tokens": one.tokens}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        known = {**one.config, "max_position_embeddings": max(one.tokens, _positions(one))}
        (folder / "config.json").write_text(json.dumps(known))
        if "planned" not in found:
            found["parameters"] = parameters(known)
            run, plan = planned(["plan"], one, folder, limit)
            found["command"] = None if run is None else asdict(run)
            found["planned"] = None if plan is None else described(plan)
        priced = before.get("others", {}).get("priced", {})
        if priced.keys() != set(one.strategies):
            priced = {text: price(text, one, folder, limit) for text in one.strategies}
        found["others"] = {"source": one.source, "priced": priced}
        found.pop("other", None)
    return found


def price(strategy: str, one: Giant, folder: Path, limit: float) -> dict[str, Any]:
    """What is said of the plan of a strategy, or the last line of a refusal."""
    _, plan = planned(["price", "--strategy", strategy], one, folder, limit)
    return {"says": last_line(folder)} if plan is None else described(plan)


def _positions(one: Giant) -> int:
    known: int = one.config["max_position_embeddings"]
    return known


def parameters(config: dict[str, Any]) -> int:
    """The number of parameters of the model that transformers builds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(one.numel() for one in model.parameters())


def planned(
    command: Sequence[str], one: Giant, folder: Path, limit: float
) -> tuple[Run | None, Plan | None]:
    """One command of shardwright, and the plan that it wrote if it did."""
    file = folder / "plan.json"
    file.unlink(missing_ok=True)
    sizes = ["--machine", MACHINE, "--batch", str(one.batch), "--seq", str(one.tokens)]
    shardwright = [sys.executable, "-m", "shardwright", command[0], str(folder / "config.json")]
    every = [*shardwright, *sizes, *command[1:], "--json", "-o", str(file)]
    environment = {"PYTHONPATH": str(record.ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    run = timed(every, environment, folder, limit)
    return run, load_plan(file) if file.exists() else None


def last_line(folder: Path) -> str:
    """The last line that a command printed."""
    lines = (folder / "output").read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""


def described(plan: Plan) -> dict[str, Any]:
    """What a row says of a plan; degrees of kinds of parallelism, as products of axes."""
    limit = preset(MACHINE).device.usable_bytes
    tokens = prod(plan.inputs[0].shape)
    return {
        "verdict": verdict(plan, limit),
        "gib": plan.peak_bytes / 2**30,
        "room_gib": (limit - plan.peak_bytes) / 2**30,
        "seconds": plan.step_seconds,
        "tokens_per_second": tokens / plan.step_seconds / plan.devices,
        "utilisation": plan.utilisation,
        "bound_seconds": plan.lower_bound_seconds,
        "headline": headline(plan),
        "degrees": degrees(plan),
        "notes": list(plan.notes),
    }


def degrees(plan: Plan) -> dict[str, int]:
    """The devices over which a plan splits experts, sequences and features, and its stages."""
    found = {"ep": 1, "cp": 1, "tp": 1, "pp": plan.stages}
    for size, use in zip(plan.layout_mesh.shape, axis_uses(plan), strict=True):
        # Tensor parallelism splits the sequence between layers.
        cp = use.sequence > _SOME and use.features <= _SOME
        for kind, used in (("ep", use.experts > _SOME), ("cp", cp), ("tp", use.features > _SOME)):
            found[kind] *= size if used else 1
    return found


if __name__ == "__main__":
    main()
