"""Chooses a plan of a search: the fastest, the smallest, or one on the fewest devices."""

from __future__ import annotations

from dataclasses import replace

from shardwright.cli.planning.capturing import CapturedTarget
from shardwright.cli.planning.named_machines import smaller_machines
from shardwright.cli.planning.searching import search, time_shares
from shardwright.cli.timings import Choice, choose_with_timings
from shardwright.ir.frontier import Frontier, InfeasibleError
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.options.plan_options import ALL, PlanOptions
from shardwright.machine.model import Machine
from shardwright.planner.audit import avoidable as avoidable_time
from shardwright.planner.audit.avoidable import NOTHING, Avoidable
from shardwright.planner.memory_limits import STATE, check_limit, limit_on
from shardwright.planner.strategies.preference import preferred
from shardwright.report.units import size

OBJECTIVES = ("time", "memory", "devices")


def choose(
    captured: CapturedTarget,
    machine: Machine,
    objective: str,
    options: PlanOptions,
    timing_seconds: float = 0.0,
) -> Choice:
    """The plan that the objective selects, and the frontier that it is from.

    Operators of this host are timed for `timing_seconds` if it is the machine. The memory limit is
    that of `Frontier.fastest`: by default the memory of a device. Raises `InfeasibleError`, naming
    the smallest sufficient memory, when nothing fits.
    """
    check_limit(machine, options.memory_limit, captured.state_bytes(machine, options), STATE)
    if objective == "devices":
        return _on_fewest_devices(captured, machine, options)

    def chosen(machine: Machine) -> Choice:
        return _choose(captured, machine, objective, options)

    if timing_seconds and machine.measured is not None:
        return choose_with_timings(captured.graph, machine, timing_seconds, chosen)
    return chosen(machine)


def _choose(
    captured: CapturedTarget, machine: Machine, objective: str, options: PlanOptions
) -> Choice:
    if objective == "memory":  # more micro-batches are tried while they save memory
        every = replace(options, micro_batches=options.micro_batches or ALL)
        frontier = search(captured, machine, every)
        return Choice(frontier.smallest(options.memory_limit), frontier)
    return _preferred(search(captured, machine, options), options)


def _preferred(frontier: Frontier, options: PlanOptions) -> Choice:
    """The fastest that fits, or a uniform strategy that is nearly as fast."""
    found = preferred(frontier, options.memory_limit)
    return Choice(found.plan, frontier, found)


def _on_fewest_devices(captured: CapturedTarget, machine: Machine, options: PlanOptions) -> Choice:
    limit = limit_on(machine, options.memory_limit)
    parts = list(smaller_machines(machine))
    enough = [
        part
        for part in parts
        if limit is None or captured.state_bytes(part, options) <= limit * part.devices
    ]
    least: InfeasibleError | None = None
    refused: ConstraintError | None = None
    tried = enough or parts[-1:]  # if none suffices, the error of the largest number is raised
    for share, part in zip(time_shares(options, len(tried)), tried, strict=True):
        try:
            return _preferred(search(captured, part, share), options)
        except ConstraintError as e:
            refused = e
        except InfeasibleError as e:
            if least is None or e.smallest_bytes < least.smallest_bytes:
                least = e
    if least is None:
        assert refused is not None  # a machine has at least one device
        raise refused
    assert limit is not None  # a larger machine fits; else the first would
    raise InfeasibleError(
        f"no plan on 1 to {machine.devices} devices of {machine} fits {size(limit)} per"
        f" rank; the smallest needs {size(least.smallest_bytes)}: raise the limit or take more"
        " devices",
        least.smallest_bytes,
    )


def avoidable(captured: CapturedTarget, machine: Machine, found: Choice) -> Avoidable:
    """Time of a step that a faster host, or an update in one kernel, would save.

    It is not computed after the time limit of the search.
    """
    if found.frontier.is_late:
        return NOTHING
    return avoidable_time.avoidable(found.plan, captured.graph, machine)
