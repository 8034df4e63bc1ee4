"""The Pareto frontier of ways to train a PyTorch model in parallel, and the way there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.api import capture, parallelize, plan, price, search, strategies, verify
    from shardwright.ir.strategy.strategy import Strategy
    from shardwright.public import Frontier, Machine, Plan
    from shardwright.rules.user_rules import rule
    from shardwright.runtime.weight_files.stored_weights import StoredWeights
    from shardwright.train.job import Job

__all__ = [
    "Frontier",
    "Job",
    "Machine",
    "Plan",
    "StoredWeights",
    "Strategy",
    "capture",
    "parallelize",
    "plan",
    "price",
    "rule",
    "search",
    "strategies",
    "verify",
]

_HOMES = {
    "Frontier": "shardwright.public",
    "Job": "shardwright.train.job",
    "Machine": "shardwright.public",
    "Plan": "shardwright.public",
    "StoredWeights": "shardwright.runtime.weight_files.stored_weights",
    "Strategy": "shardwright.ir.strategy.strategy",
    "rule": "shardwright.rules.user_rules",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: `import shardwright` does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "shardwright.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
