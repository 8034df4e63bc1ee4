"""Times operators of this host at the sizes of plans, and plans again; the age of its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import click

from shardwright.cli.console import working
from shardwright.ir.frontier import Frontier
from shardwright.ir.graph import Graph
from shardwright.ir.plan import Plan
from shardwright.machine.measurement import Measured
from shardwright.machine.model import Machine
from shardwright.planner.strategies.preference import Preferred

_ROUNDS = 2  # the plan chosen with timings may have operators of other sizes


class Choice(NamedTuple):
    """A plan, the frontier that it is from, and what else was preferred or not."""

    plan: Plan
    frontier: Frontier
    preferred: Preferred | None = None


def choose_with_timings(
    graph: Graph, machine: Machine, seconds: float, choose: Callable[[Machine], Choice]
) -> Choice:
    """The choice when the dominating operators of plans cost their measured times.

    Operators without cached timings are measured, for about `seconds` in total.
    """
    from shardwright.machine.calls import by_target
    from shardwright.planner.tables.hot_ops import hot_calls
    from shardwright.profile.op_timings import user_timing_cache, with_cached_timings, with_timings
    from shardwright.rules.analysis import analyze

    known = user_timing_cache(lambda text: click.echo(f"warning: {text}", err=True))
    machine = with_cached_timings(machine, known)
    found = choose(machine)
    analysis, end = analyze(graph), time.monotonic() + seconds
    for _ in range(_ROUNDS):
        frontier = found.frontier
        calls = hot_calls(graph, analysis, (found.plan, *frontier.baselines, *frontier))
        before, left = machine, end - time.monotonic()
        if left <= 0:
            break
        with working("timing operators") as tell:
            machine = with_timings(machine, calls, left, known, tell)
        if machine is before:
            break
        new = len(machine.device.timings) - len(before.device.timings)
        kinds = len(by_target(machine.device.timings))
        click.echo(
            f"timed {new} operators of these plans on this host, remembered in {known.file}"
            f" ({kinds} kinds); --time-operators 0 goes without",
            err=True,
        )
        found = choose(machine)
    return found


def measurement_age(machine: Machine, measured: Measured) -> str:
    """Notes on the figures of this host: their age, doubts about them, and how to renew them."""
    tuned = " --tune-host" if measured.tuned_host else ""
    renew = f"`shardwright profile --devices {machine.devices}{tuned}`"
    if doubts := measured.doubts:
        return (
            f"warning: the figures of this host are doubtful: {'; '.join(doubts)}; they are"
            f" measured again the next time, or now by {renew}"
        )
    return f"{machine}: measured {measured.age()}; {renew} measures again"
