"""Caches plans beside a run's checkpoints, so that a restart searches nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.cli.errors import UsageError
from shardwright.cli.planning import capturing
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Plan, PlanError
from shardwright.machine.files.toml import to_toml
from shardwright.machine.model import Machine
from shardwright.plan_io.files import load_plan, save_plan
from shardwright.planner.memory_limits import limit_on

_VERSION = 2  # version 1 stored parameters in layouts that are rejected now


def cache_key(
    captured: capturing.CapturedTarget,
    machine: Machine,
    options: PlanOptions,
    timing_seconds: float,
) -> str:
    """The key of a search: a digest of graph, optimizer, machine, options, timing seconds."""
    limit = limit_on(machine, options.memory_limit)
    options = replace(options, memory_limit=None, optimizer=captured.optimizer, processes=1)
    graph = captured.graph.fingerprint
    asked = (_VERSION, graph, to_toml(machine), limit, options, timing_seconds)
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Plan files in `folder`, by key."""

    folder: Path

    def file(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def find(self, key: str) -> Plan | None:
        """The plan of this key; None if there is none or it cannot be read."""
        try:
            return load_plan(self.file(key)) if self.file(key).exists() else None
        except PlanError:
            return None

    def keep(self, key: str, plan: Plan) -> None:
        """Write the plan; raises `UsageError` where that is not possible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            folder, reason = self.folder.parent, e.strerror
            raise UsageError(
                f"cannot use {folder} for checkpoints: {reason}; give another folder"
            ) from e
        save_plan(plan, self.file(key))
