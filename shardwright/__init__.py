"""The Pareto frontier of ways to train a PyTorch model in parallel, and the way there."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.api import capture, parallelize, plan, search, verify
    from shardwright.ir.frontier import Frontier
    from shardwright.ir.plan import Plan
    from shardwright.profile.measured_machine import Machine
    from shardwright.rules.user_rules import rule
    from shardwright.train.job import Job

__all__ = [
    "Frontier",
    "Job",
    "Machine",
    "Plan",
    "capture",
    "parallelize",
    "plan",
    "rule",
    "search",
    "verify",
]

_HOMES = {
    "Frontier": "shardwright.ir.frontier",
    "Job": "shardwright.train.job",
    "Machine": "shardwright.profile.measured_machine",
    "Plan": "shardwright.ir.plan",
    "rule": "shardwright.rules.user_rules",
}


class _Package(types.ModuleType):
    """The package, whose functions `capture` and `search` share their names with two rooms.

    Importing a room would put it where the function belongs, so the public names
    are properties. They are looked up when they are used: `import shardwright`
    does not import torch.
    """


def _public(name: str) -> property:
    def get(_package: types.ModuleType) -> Any:
        return getattr(importlib.import_module(_HOMES.get(name, "shardwright.api")), name)

    def ignore(_package: types.ModuleType, _room: Any) -> None:
        """The import system's note of a room of this name; `sys.modules` has it anyway."""

    return property(get, ignore)


for _name in __all__:
    setattr(_Package, _name, _public(_name))
sys.modules[__name__].__class__ = _Package
