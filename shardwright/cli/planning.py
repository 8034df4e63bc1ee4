"""From TARGET and MACHINE to a frontier and a choice: shared by `plan`, `frontier` and `run`."""

from __future__ import annotations

import contextlib
import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from shardwright.cli.console import working
from shardwright.cli.errors import UsageError
from shardwright.cli.options import PlanOfTarget
from shardwright.cli.timings import by_timings
from shardwright.ir.constraints import ConstraintError
from shardwright.ir.frontier import Frontier, InfeasibleError
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.pipeline import PipelineError
from shardwright.ir.plan import Plan, PlanError
from shardwright.machine.files import load_machine, with_figures
from shardwright.machine.measurement import Measured
from shardwright.machine.model import Machine, MachineError
from shardwright.machine.presets import preset
from shardwright.plan_io.files import load_plan
from shardwright.planner.memory_limits import STATE, WEIGHTS, check_limit, limit_on
from shardwright.planner.micro_batch_counts import ALL
from shardwright.report.text.explain import WIDTH
from shardwright.report.units import size

if TYPE_CHECKING:
    from shardwright.train.job import Job

OBJECTIVES = ("time", "memory", "devices")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asks of a search beside its target and machine."""

    constraints: tuple[str, ...] = ()
    seconds: float = math.inf
    method: str = "joint"
    micro_batches: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    allow_async: bool = False
    timing_seconds: float = 0.0  # for single operators of this host, if it is planned for

    def shares(self, searches: int) -> Iterator[Wishes]:
        """The same for each of several searches, which share the time that is left."""
        end = time.monotonic() + self.seconds
        for left in range(searches, 0, -1):
            yield replace(self, seconds=max(0.0, end - time.monotonic()) / left)


@dataclass(frozen=True, slots=True)
class Captured:
    """The serial graph of a target, and what planning needs beside it."""

    job: Job
    graph: Graph
    optimizer: str
    seconds: float

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state: some rank holds its even share."""
        from shardwright.planner.tables.memory import state_bytes

        return state_bytes(self.graph, self.optimizer)


def capture(
    target: str,
    batch: int | None,
    seq: int | None,
    settings: Sequence[str] = (),
    optimizer: str | None = None,
    *,
    habits: Mapping[str, str] = MappingProxyType({}),
    machine: Machine | None = None,
    memory_limit: int | str | None = None,
) -> Captured:
    """Load TARGET and capture its model, on the meta device where it can be built there.

    `habits` go before those of the job. Where `machine` is given, weights that its devices cannot
    hold within `memory_limit` are refused before the capture.
    """
    with working(f"capturing {target}"):
        from shardwright import api
        from shardwright.tracing.arguments import weight_bytes
        from shardwright.tracing.export.opaque import WeightsNeededError
        from shardwright.train.targets.target import (
            build_model,
            half_precision,
            load_job,
            optimizer_name,
        )

        job = load_job(target, batch, seq, settings)
        named = half_precision(target) if "precision" not in habits else None
        args, kwargs = job.call()
        chosen = {**asdict(job.habits), **habits}
        start = time.perf_counter()
        model = build_model(job, meta=True)
        name = optimizer if optimizer is not None else optimizer_name(job, model)
        if machine is not None:
            check_limit(machine, memory_limit, weight_bytes(model), WEIGHTS)
        try:
            graph = api.capture(model, args, kwargs, **chosen)
        except WeightsNeededError:  # a sub-module has to be run to know what it returns
            graph = api.capture(build_model(job), args, kwargs, **chosen)
        seconds = time.perf_counter() - start
    if named is not None:
        words = (
            f"note: {target} names {named}; this is about training in float32, as the model is"
            " built. --precision bf16 computes in bfloat16 and keeps parameters in float32"
        )
        click.echo(textwrap.fill(words, WIDTH, subsequent_indent="  "), err=True)
    return Captured(job, graph, name, seconds)


def planned(given: PlanOfTarget, devices: int | None = None) -> tuple[Captured, Plan]:
    """TARGET as the plan wants it captured, and the plan, which must be one for it."""
    habits = asdict(load_plan(given.plan).habits)
    captured = capture(given.target, given.batch, given.seq, given.settings, habits=habits)
    return captured, plan_in_file(given.plan, captured, devices)


def machine_of(
    text: str, devices: int | None = None, figures: Mapping[str, object] = MappingProxyType({})
) -> Machine:
    """The machine that MACHINE names, reduced to `devices`, with other `figures` of these names."""
    return with_figures(_named(text, devices), **figures)


def _named(text: str, devices: int | None) -> Machine:
    if text == "here":
        with working("measuring this host") as tell:
            from shardwright.profile.measure import measure_host

            found = measure_host(devices or devices_here(), tell=tell)
        if found.measured is not None:
            words = _since(found, found.measured)
            click.echo(textwrap.fill(words, WIDTH, subsequent_indent="  "), err=True)
        return found
    machine = load_machine(text) if _is_file(text) else preset(text)
    return machine if devices is None else machine.with_devices(devices)


def _since(machine: Machine, measured: Measured) -> str:
    """From when the figures of this host are, whether to believe them, and how to renew them."""
    renew = f"`shardwright profile --devices {machine.devices}`"
    if doubts := measured.doubts:
        return (
            f"warning: the figures of this host are doubtful: {'; '.join(doubts)}; they are"
            f" measured again the next time, or now by {renew}"
        )
    return f"{machine}: measured {measured.age()}; {renew} measures again"


def check(machines: Sequence[Machine], wishes: Wishes, batch: int | None = None) -> None:
    """Raise the mistakes that show before a model is captured, if no machine is without one.

    `batch` is the size of the batch where it is known.
    """
    from shardwright.planner.arguments import check_arguments

    last: ValueError | None = None
    for machine in machines:
        try:
            check_arguments(
                machine,
                wishes.constraints,
                wishes.stages or (1,),
                method=wishes.method,
                micro_batches=wishes.micro_batches or None,
                allow_async=wishes.allow_async,
                batch=batch,
            )
            return
        except (ConstraintError, PipelineError) as e:
            last = e
    if last is not None:
        raise last


def search(
    captured: Captured,
    machine: Machine,
    wishes: Wishes,
    memory_limit: int | str | None = None,
    *,
    smallest: bool = False,
) -> Frontier:
    """The frontier of one graph on one machine, with the micro-batches that `wishes` name.

    Without any more than one are tried where the limit makes plans slower or rules all out, or, if
    the `smallest` plan is asked for, for as long as they save memory.
    """
    counts: Sequence[int] | str | None = wishes.micro_batches or (ALL if smallest else None)
    with working(f"searching plans for {machine}") as progress:
        from shardwright import api

        return api.search(
            captured.graph,
            machine,
            captured.optimizer,
            method=wishes.method,
            constraints=wishes.constraints,
            seconds=wishes.seconds,
            micro_batches=counts if wishes.method == "joint" else wishes.micro_batches or (1,),
            memory_limit=memory_limit,
            stages=wishes.stages or (1,),
            allow_async=wishes.allow_async,
            progress=progress,
        )


def surface(
    captured: Captured, machines: Sequence[Machine], wishes: Wishes
) -> tuple[list[tuple[Machine, Frontier]], dict[int, str]]:
    """A frontier for each machine, and why the constraints leave some, by devices, without one.

    Raises `ConstraintError` if they leave none.
    """
    found: list[tuple[Machine, Frontier]] = []
    reasons: dict[int, str] = {}
    for share, machine in zip(wishes.shares(len(machines)), machines, strict=True):
        try:
            found.append((machine, search(captured, machine, share)))
        except (ConstraintError, PipelineError) as e:
            if machine is machines[-1] and not found:
                raise
            reasons[machine.devices] = str(e)
    return found, reasons


def choose(
    captured: Captured,
    machine: Machine,
    objective: str,
    memory_limit: int | str | None,
    wishes: Wishes,
) -> tuple[Plan, Frontier]:
    """The plan that the objective asks for, and the frontier it comes from.

    The memory limit is that of `Frontier.fastest`: by default the memory of a device. Raises
    `InfeasibleError`, naming the smallest memory that would do, when nothing fits.
    """
    check_limit(machine, memory_limit, captured.state_bytes, STATE)
    if objective == "devices":
        return _on_fewest_devices(captured, machine, memory_limit, wishes)

    def chosen(machine: Machine) -> tuple[Plan, Frontier]:
        return _choose(captured, machine, objective, memory_limit, wishes)

    if wishes.timing_seconds and machine.measured is not None:
        return by_timings(captured.graph, machine, wishes.timing_seconds, chosen)
    return chosen(machine)


def _choose(
    captured: Captured,
    machine: Machine,
    objective: str,
    memory_limit: int | str | None,
    wishes: Wishes,
) -> tuple[Plan, Frontier]:
    smallest = objective == "memory"
    frontier = search(captured, machine, wishes, memory_limit, smallest=smallest)
    if smallest:
        return frontier.smallest(memory_limit), frontier
    return frontier.fastest(memory_limit), frontier


def _on_fewest_devices(
    captured: Captured, machine: Machine, memory_limit: int | str | None, wishes: Wishes
) -> tuple[Plan, Frontier]:
    limit = limit_on(machine, memory_limit)
    parts = list(machine_parts(machine))
    enough = [p for p in parts if limit is None or captured.state_bytes <= limit * p.devices]
    least: InfeasibleError | None = None
    refused: ConstraintError | None = None
    tried = enough or parts[-1:]  # where no number will do, the largest says what would
    for share, part in zip(wishes.shares(len(tried)), tried, strict=True):
        try:
            frontier = search(captured, part, share, memory_limit)
            return frontier.fastest(memory_limit), frontier
        except ConstraintError as e:
            refused = e
        except InfeasibleError as e:
            if least is None or e.smallest_bytes < least.smallest_bytes:
                least = e
    if least is None:
        assert refused is not None  # a machine has at least one device
        raise refused
    assert limit is not None  # or the first would fit
    raise InfeasibleError(
        f"no plan on 1 to {machine.devices} devices of {machine} fits {size(limit)} per"
        f" rank; the smallest needs {size(least.smallest_bytes)}: raise the limit or take more"
        " devices",
        least.smallest_bytes,
    )


def machine_parts(machine: Machine) -> Iterator[Machine]:
    """The machine with one device, with two and so on, where they split evenly over the hosts."""
    for devices in range(1, machine.devices + 1):
        with contextlib.suppress(MachineError):
            yield machine.with_devices(devices)


def plan_in_file(file: str, captured: Captured, devices: int | None) -> Plan:
    """The plan in `file`, which must be one for this graph and this number of devices."""
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


def _is_file(text: str) -> bool:
    return text.endswith(".toml") or Path(text).is_file()


def devices_here() -> int:
    """GPUs of this host; without any, its cores."""
    import os

    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1
