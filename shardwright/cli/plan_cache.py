"""Caches plans beside a run's checkpoints, so that a restart searches nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shardwright.cli import planning
from shardwright.cli.errors import UsageError
from shardwright.ir.plan import Plan, PlanError
from shardwright.machine.model import Machine
from shardwright.machine.toml import to_toml
from shardwright.plan_io.files import load_plan, save_plan

_VERSION = 2  # plans of the first one store parameters in layouts that are refused now


def cache_key(
    captured: planning.Captured, machine: Machine, limit: int | None, wishes: object
) -> str:
    """A name for the search: graph, optimizer, machine, memory limit and wishes."""
    asked = (_VERSION, captured.graph.fingerprint, captured.optimizer, to_toml(machine), limit)
    return hashlib.sha256(repr((*asked, wishes)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Plan files in `folder`, by key."""

    folder: Path

    def file(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def find(self, key: str) -> Plan | None:
        """The plan of this key; one that cannot be read is as good as none."""
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
