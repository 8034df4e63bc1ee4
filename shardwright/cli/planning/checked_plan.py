"""Reads a plan file and checks it against the target that it is used for."""

from __future__ import annotations

from dataclasses import asdict

from shardwright.cli.errors import UsageError
from shardwright.cli.groups import PlanOfTarget
from shardwright.cli.planning.capturing import CapturedTarget, capture
from shardwright.ir.graph import LeafKind
from shardwright.ir.plan import Plan, PlanError
from shardwright.plan_io.files import load_plan


def planned(given: PlanOfTarget, devices: int | None = None) -> tuple[CapturedTarget, Plan]:
    """TARGET captured with the plan's numerics, and the plan, checked against it."""
    numerics = load_plan(given.plan).numerics
    numerics.require_executed()
    captured = capture(given.target, numerics=asdict(numerics))
    return captured, plan_in_file(given.plan, captured, devices)


def plan_in_file(file: str, captured: CapturedTarget, devices: int | None) -> Plan:
    """The plan in `file`, checked against this graph and number of devices."""
    plan = load_plan(file)
    if devices is not None and plan.devices != devices:
        raise UsageError(
            f"{file} is a plan for {plan.devices} devices, --devices is {devices}; start it with"
            f" --devices {plan.devices} or plan again"
        )
    graph = captured.graph
    planned = {i.key: (i.shape, i.dtype) for i in plan.inputs}
    given = {
        leaf.keys[0]: (graph.tensor[leaf.name].shape, graph.tensor[leaf.name].dtype)
        for leaf in graph.leaves_of(LeafKind.INPUT)
    }
    if planned.keys() != given.keys():
        raise PlanError(
            f"{file} is a plan for another model: that takes {', '.join(planned)}, the target's"
            f" takes {', '.join(given)}; plan again"
        )
    for key in planned:
        if planned[key] != given[key]:
            raise PlanError(
                f"{file} is a plan for {key} {_input(planned[key])}, the target gives"
                f" {_input(given[key])}; change the batch back or plan again"
            )
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"{file} is a plan for another model: its graph is {plan.fingerprint}, that of the"
            f" target {graph.fingerprint}; plan again"
        )
    return plan


def _input(known: tuple[tuple[int, ...], str]) -> str:
    return f"{known[1]}{list(known[0])}"
