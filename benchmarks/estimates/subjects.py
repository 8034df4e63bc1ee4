"""Models with the plans that are compared: those of a search, or those of given strategies."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

import shardwright as sw
from benchmarks.estimates.models import MODELS
from benchmarks.estimates.worker import SEED
from shardwright.ir.frontier import Frontier
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Plan
from shardwright.machine.calls import OpCall
from shardwright.machine.model import Machine
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.planner.recost import recosted
from shardwright.planner.tables.hot_ops import hot_calls
from shardwright.profile.local_ranks import silent
from shardwright.profile.op_timings import with_timings
from shardwright.profile.timing_cache import TimingCache
from shardwright.rules.analysis import analyze

BASELINES = ("data parallel", "fully sharded", "tensor parallel")


def _program(plan: Plan) -> Plan:
    """`plan` without what is only said of it."""
    none = Seconds(0.0)
    bare = replace(plan, name="", notes=(), timeline=None)
    return replace(bare, step_seconds=none, lower_bound_seconds=none)


@dataclass(frozen=True)
class Subject:
    """A model with the plans that are compared, and the calls that are timed for them.

    `batch` is the number of samples of a step; None: the model's own.
    """

    name: str
    graph: Graph
    frontier: Frontier
    plans: dict[str, Plan]
    calls: tuple[OpCall, ...]
    batch: int | None = None

    @cached_property
    def programs(self) -> dict[str, str]:
        """Of every plan the text of the program that runs: equal plans have one."""
        return {title: plan_to_json(_program(plan)) for title, plan in self.plans.items()}

    def again(self, machine: Machine, seconds: float) -> dict[str, Plan]:
        """The same plans by what a machine is now, its operators timed anew."""
        machine = _timed(machine, self.calls, seconds)
        return {
            title: recosted(plan, self.graph, machine, plan.optimizer, self.frontier)
            for title, plan in self.plans.items()
        }


def searched(name: str, machine: Machine, seconds: float) -> Subject:
    """The chosen plan and the baselines of `BASELINES`, as `plan --machine here` makes them.

    Operators that dominate are timed at their local sizes, for about `seconds` in all.
    """
    graph = _captured(name)
    frontier = sw.search(graph, machine)
    calls: tuple[OpCall, ...] = ()
    if seconds:
        calls = tuple(hot_calls(graph, analyze(graph), (*frontier, *frontier.baselines)))
        frontier = sw.search(graph, _timed(machine, calls, seconds))
    known = {plan.name: plan for plan in frontier.baselines}
    compared = {name: frontier.settled(known[name]) for name in BASELINES if name in known}
    return Subject(name, graph, frontier, {"chosen": frontier.fastest(), **compared}, calls)


def priced(
    strategies: Mapping[str, str], batch: int, name: str, machine: Machine, seconds: float
) -> Subject:
    """The plans of `strategies`, texts by title, as `price` shows them; timed as in `searched`."""
    graph = _captured(name, batch)

    def plans(machine: Machine) -> dict[str, Plan]:
        return {title: sw.price(graph, machine, text) for title, text in strategies.items()}

    found = plans(machine)
    calls: tuple[OpCall, ...] = ()
    if seconds:
        calls = tuple(hot_calls(graph, analyze(graph), found.values()))
        found = plans(_timed(machine, calls, seconds))
    first = Frontier(tuple(found.values())[:1])  # nothing was searched
    return Subject(name, graph, first, found, calls, batch)


def _captured(name: str, batch: int | None = None) -> Graph:
    torch.manual_seed(SEED)
    model, given = MODELS[name]() if batch is None else MODELS[name](batch)
    return sw.capture(model, (), given)


def _timed(machine: Machine, calls: Sequence[OpCall], seconds: float) -> Machine:
    """`machine` with timings of `calls`, none of which is remembered from before."""
    with tempfile.TemporaryDirectory() as folder:
        known = TimingCache(Path(folder) / "timings.sqlite", warn)
        return with_timings(machine, calls, seconds, known, silent) if seconds else machine


def warn(text: str) -> None:
    """Print a warning on the standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
