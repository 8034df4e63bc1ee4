"""Saves plans to files and loads them, also the one for a number of devices from a folder."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.ir.atomic_io import FileSizeError, read_text_up_to, write_atomically
from shardwright.ir.plan import Plan, PlanError
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json

_LARGEST = 2**28  # bytes of a plan file; one of 10,000 operators has 4 MiB


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` as JSON to `path`, atomically; raises `PlanError` where that is not possible."""
    try:
        write_atomically(path, plan_to_json(plan) + "\n")
    except OSError as e:
        raise PlanError(f"cannot write plan {path}: {e.strerror}; choose another path") from e


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file; raises `PlanError` for anything that is not a whole, valid plan."""
    try:
        text = read_text_up_to(path, _LARGEST)
    except (OSError, UnicodeDecodeError, FileSizeError) as e:
        reason = getattr(e, "strerror", None) or e
        raise PlanError(f"cannot read plan {path}: {reason}; give a file that `plan` wrote") from e
    try:
        return plan_from_json(text)
    except PlanError as e:
        raise PlanError(f"plan {path}: {e}") from e


def plan_for(path: str | os.PathLike[str], devices: int) -> Plan:
    """The plan in the file `path`, or the one for `devices` in the folder `path`.

    With a folder, an elastic torchrun (`--nnodes 1:4`) finds a plan for each number of hosts.
    Raises `PlanError` where the folder has no plan for `devices`, or several.
    """
    if not Path(path).is_dir():
        return load_plan(path)
    files = sorted(Path(path).glob("*.json"))
    plans = {file: load_plan(file) for file in files}
    found = [file for file, plan in plans.items() if plan.devices == devices]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise PlanError(
            f"{path} has several plans for {devices} devices ({names}); leave one for each number"
        )
    if not found:
        known = ", ".join(map(str, sorted({plan.devices for plan in plans.values()}))) or "none"
        raise PlanError(
            f"{path} has no plan for {devices} devices; it has some for {known}: plan for"
            f" {devices} too"
        )
    return plans[found[0]]
