"""From TARGET and MACHINE to a frontier and a choice: what `plan`, `frontier` and `run` share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardwright.cli.console import working
from shardwright.cli.errors import UsageError
from shardwright.ir.frontier import Frontier, InfeasibleError
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.machine import Machine, MachineError
from shardwright.ir.plan import Plan, PlanError
from shardwright.report.units import size

if TYPE_CHECKING:
    from shardwright.train.job import Job

OBJECTIVES = ("time", "memory", "devices")


@dataclass(frozen=True, slots=True)
class Captured:
    """The serial graph of a target, and what planning needs beside it."""

    job: Job
    graph: Graph
    optimizer: str
    seconds: float


def capture(
    target: str,
    batch: int | None,
    seq: int | None,
    optimizer: str | None = None,
    *,
    habits: Mapping[str, str] = MappingProxyType({}),
) -> Captured:
    """Load TARGET and capture its model, on the meta device where it can be built there.

    `habits` go before those of the job.
    """
    with working(f"capturing {target}"):
        from shardwright import api
        from shardwright.capture.opaque import WeightsNeededError
        from shardwright.train.target import build_model, load_job, optimizer_name

        job = load_job(target, batch, seq)
        args, kwargs = job.call()
        chosen = {**asdict(job.habits), **habits}
        start = time.perf_counter()
        try:
            graph = api.capture(build_model(job, meta=True), args, kwargs, **chosen)
        except WeightsNeededError:  # a sub-module has to be run to know what it returns
            graph = api.capture(build_model(job), args, kwargs, **chosen)
        return Captured(job, graph, optimizer or optimizer_name(job), time.perf_counter() - start)


def planned(
    target: str, batch: int | None, seq: int | None, file: str, devices: int | None
) -> tuple[Captured, Plan]:
    """TARGET as the plan in `file` wants it captured, and the plan, which must be one for it."""
    plan = Plan.load(file)
    captured = capture(target, batch, seq, habits=asdict(plan.habits))
    return captured, load_plan(file, captured, devices)


def machine_of(text: str, devices: int | None = None) -> Machine:
    """The machine that MACHINE names, reduced to `devices` of its devices."""
    if text == "here":
        with working("measuring this host"):
            from shardwright.runtime.measure import measure_host

            return measure_host(devices or _devices_here())
    machine = Machine.load(text) if _is_file(text) else Machine.preset(text)
    return machine if devices is None else machine.with_devices(devices)


def search(captured: Captured, machine: Machine, method: str = "joint") -> Frontier:
    """The frontier of one graph on one machine."""
    with working(f"searching plans for {machine}") as progress:
        from shardwright import api

        return api.search(
            captured.graph, machine, captured.optimizer, method=method, progress=progress
        )


def choose(
    captured: Captured,
    machine: Machine,
    objective: str,
    memory_limit: int,
    method: str = "joint",
) -> tuple[Plan, Frontier]:
    """The plan that the objective asks for, and the frontier it comes from.

    Raises `InfeasibleError`, naming the smallest memory that would do, when
    nothing fits.
    """
    if objective == "devices":
        return _on_fewest_devices(captured, machine, memory_limit, method)
    frontier = search(captured, machine, method)
    fastest = frontier.fastest(memory_limit)
    return (frontier.smallest() if objective == "memory" else fastest), frontier


def _on_fewest_devices(
    captured: Captured, machine: Machine, memory_limit: int, method: str
) -> tuple[Plan, Frontier]:
    least: InfeasibleError | None = None
    for devices in range(1, machine.devices + 1):
        try:
            part = machine.with_devices(devices)
        except MachineError:  # so many do not split evenly over the hosts
            continue
        frontier = search(captured, part, method)
        try:
            return frontier.fastest(memory_limit), frontier
        except InfeasibleError as e:
            if least is None or e.smallest_bytes < least.smallest_bytes:
                least = e
    assert least is not None  # a machine has at least one device
    raise InfeasibleError(
        f"no plan on 1 to {machine.devices} devices of {machine} fits {size(memory_limit)} per"
        f" rank; the smallest needs {size(least.smallest_bytes)}: raise the limit or take more"
        " devices",
        least.smallest_bytes,
    )


def load_plan(file: str, captured: Captured, devices: int | None) -> Plan:
    """The plan in `file`, which must be one for this graph and this number of devices."""
    plan = Plan.load(file)
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
    for key in (*planned, *given):
        if planned.get(key) != given.get(key):
            raise PlanError(
                f"{file} is a plan for {key} {_input(planned.get(key))}, the target gives"
                f" {_input(given.get(key))}; change the batch back or plan again"
            )
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"{file} is a plan for another model: its graph is {plan.fingerprint}, that of the"
            f" target {graph.fingerprint}; plan again"
        )
    return plan


def _input(known: tuple[tuple[int, ...], str] | None) -> str:
    return f"{known[1]}{list(known[0])}" if known else "nothing"


def _is_file(text: str) -> bool:
    return text.endswith(".toml") or Path(text).is_file()


def _devices_here() -> int:
    """GPUs of this host; without any, its cores."""
    import os

    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1
