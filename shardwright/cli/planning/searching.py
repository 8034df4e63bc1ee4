"""Searches plans of a captured target on one or several machines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.cli.console import working
from shardwright.cli.planning.capturing import CapturedTarget
from shardwright.ir.frontier import Frontier
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.options.plan_options import DEFAULTS, PlanOptions
from shardwright.ir.plan import Plan
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.model import Machine


def check(machines: Sequence[Machine], options: PlanOptions, batch: int | None = None) -> None:
    """Raise errors of options that show before the capture, if every machine has one.

    `batch` is the number of samples, if known.
    """
    from shardwright.planner.arguments import search_scope

    last: ValueError | None = None
    for machine in machines:
        try:
            search_scope(machine, options, batch)
            return
        except (ConstraintError, PipelineError) as e:
            last = e
    if last is not None:
        raise last


def searches_pipelines(machine: Machine, options: PlanOptions, plan: Plan) -> bool:
    """Whether the search that found `plan`, for devices of `machine`, tries pipelines."""
    from shardwright.planner.arguments import search_scope

    return search_scope(machine.with_devices(plan.devices), options).pipelines


def time_shares(options: PlanOptions, searches: int) -> Iterator[PlanOptions]:
    """The options of each of several searches that share one time limit."""
    end = time.monotonic() + options.seconds
    for left in range(searches, 0, -1):
        yield replace(options, seconds=max(0.0, end - time.monotonic()) / left)


def search(captured: CapturedTarget, machine: Machine, options: PlanOptions = DEFAULTS) -> Frontier:
    """The frontier of one graph on one machine, with the optimizer of the target."""
    options = replace(options, optimizer=captured.optimizer)
    with working(f"searching plans for {machine}") as progress:
        from shardwright.public import search_with

        return search_with(
            captured.graph, machine, options, progress, tracer=captured.tracer(machine)
        )


def frontiers(
    captured: CapturedTarget, machines: Sequence[Machine], options: PlanOptions, points: int
) -> tuple[list[tuple[Machine, Frontier]], dict[int, str]]:
    """The frontier of each machine, and by device count why constraints leave some without plans.

    At most `points` plans of each are simulated. Raises `ConstraintError` if constraints leave all
    machines without plans.
    """
    found: list[tuple[Machine, Frontier]] = []
    reasons: dict[int, str] = {}
    for share, machine in zip(time_shares(options, len(machines)), machines, strict=True):
        try:
            frontier = search(captured, machine, share)
            with working("following the memory of plans"):
                found.append((machine, frontier.all_settled(points)))
        except (ConstraintError, PipelineError) as e:
            if machine is machines[-1] and not found:
                raise
            reasons[machine.devices] = str(e)
    return found, reasons
