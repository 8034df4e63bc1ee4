"""Selects the plan for the available devices from a file or a folder."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.ir.plan import Plan, PlanError
from shardwright.plan_io.files import load_plan


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
