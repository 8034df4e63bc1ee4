"""From TARGET and MACHINE to a frontier and a choice: shared by `plan`, `frontier` and `run`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from shardwright.cli.console import working, wrapped
from shardwright.cli.errors import UsageError
from shardwright.cli.groups import MachineOptions, PlanOfTarget
from shardwright.cli.timings import Choice, choose_with_timings, measurement_age
from shardwright.ir.frontier import Frontier, InfeasibleError
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.options.plan_options import ALL, DEFAULTS, PlanOptions
from shardwright.ir.plan import Plan, PlanError
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.files.loading import load_machine, with_figures
from shardwright.machine.model import Machine, MachineError
from shardwright.machine.presets import preset
from shardwright.plan_io.files import load_plan
from shardwright.planner.audit import avoidable as avoidable_time
from shardwright.planner.audit.avoidable import Avoidable
from shardwright.planner.memory_limits import STATE, WEIGHTS, check_limit, limit_on
from shardwright.planner.strategies.preference import preferred
from shardwright.report.units import size
from shardwright.train.targets.capture_cache import (
    CachedCapture,
    capture_key,
    keep_capture,
    kept_capture,
)
from shardwright.train.targets.target_text import ConfigTarget, Target, parse_target
from shardwright.train.targets.trace_cache import KeptTraces, new_tracer

if TYPE_CHECKING:
    from shardwright.train.job import Job

OBJECTIVES = ("time", "memory", "devices")


def time_shares(options: PlanOptions, searches: int) -> Iterator[PlanOptions]:
    """The options of each of several searches that share one time limit."""
    end = time.monotonic() + options.seconds
    for left in range(searches, 0, -1):
        yield replace(options, seconds=max(0.0, end - time.monotonic()) / left)


@dataclass(frozen=True, slots=True)
class CapturedTarget:
    """The serial graph of a target, and further inputs of a search.

    Attributes:
        load: makes the job of the target.
        graph: its graph.
        optimizer: the name of its optimizer in plans.
        seconds: that the capture took, or reading it from the cache.
        weight_bytes: bytes of all parameters of the model as it is built.
        precision: in which one it was captured, and why.
        key: that of the capture in the user's cache; empty if nothing is kept there.
    """

    load: Callable[[], Job]
    graph: Graph
    optimizer: str
    seconds: float
    weight_bytes: int = 0
    precision: str = ""
    key: str = ""
    _traces: dict[bool, KeptTraces] = field(default_factory=dict)

    def tracer(self, machine: Machine) -> OpTracer:
        """A tracer of operator calls, whose traces are kept when the command ends."""
        on_cpu = machine.backend_spec.device == "cpu"
        context = click.get_current_context(silent=True)
        if not self.key or context is None:
            return new_tracer(on_cpu=on_cpu)
        if on_cpu not in self._traces:
            self._traces[on_cpu] = KeptTraces(self.key, on_cpu=on_cpu)
            context.call_on_close(self._traces[on_cpu].keep)
        return self._traces[on_cpu]

    def named(self, plan: Plan) -> Plan:
        """A plan of the graph that says its precision, and who chose that."""
        return replace(plan, chosen_precision=self.precision)

    @property
    def job(self) -> Job:
        """The job of the target."""
        return self.load()

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state; some rank holds an even share."""
        from shardwright.planner.tables.memory import state_bytes

        return state_bytes(self.graph, self.optimizer)


def capture(
    target: Target,
    optimizer: str | None = None,
    *,
    numerics: Mapping[str, str] = MappingProxyType({}),
    machine: Machine | None = None,
    memory_limit: int | str | None = None,
    faster_in_bf16: bool = False,
) -> CapturedTarget:
    """Load TARGET and capture its model, on the meta device if it can be built there.

    The capture of a `config.json` is read from the user's cache if it is there, else kept there.

    `numerics` override those of the job, and the precision of a config's dtype. With `machine`,
    weights that its devices cannot hold within `memory_limit` are rejected before the capture.
    """

    def checked(weight_bytes: int) -> None:
        if machine is not None:
            check_limit(machine, memory_limit, weight_bytes, WEIGHTS)

    with working(f"capturing {target.text}"):
        parsed = parse_target(target.text, target.batch, target.seq, target.settings)
        given = target, optimizer, numerics, checked
        make = partial(_captured, *given, faster_in_bf16=faster_in_bf16)
        if not target.cached or not isinstance(parsed, ConfigTarget):
            return make()
        key = capture_key(parsed, numerics, optimizer, faster_in_bf16=faster_in_bf16)
        return kept_or_made(key, partial(_job, target), make, checked)


def kept_or_made(
    key: str,
    load: Callable[[], Job],
    make: Callable[[], CapturedTarget],
    check: Callable[[int], None] = lambda _: None,
) -> CapturedTarget:
    """The capture of this key in the user's cache, or what `make` captures, which is kept there.

    `load` makes the job of the target, and `check` rejects too many bytes of kept weights.
    """
    start = time.perf_counter()
    if (known := kept_capture(key)) is None:
        found = make()
        made = found.graph, found.optimizer, found.precision, found.weight_bytes
        keep_capture(key, CachedCapture(*made))
        return replace(found, key=key)
    check(known.weight_bytes)
    return CapturedTarget(
        cache(load),
        known.graph,
        known.optimizer,
        time.perf_counter() - start,
        known.weight_bytes,
        known.precision,
        key,
    )


def _captured(
    target: Target,
    optimizer: str | None,
    numerics: Mapping[str, str],
    check: Callable[[int], None],
    *,
    faster_in_bf16: bool,
) -> CapturedTarget:
    """Capture the model of a target without the cache."""
    from shardwright.tracing.call import CaptureError
    from shardwright.train.targets.hf_config import forward_refusal
    from shardwright.train.targets.precision import chosen_precision
    from shardwright.train.targets.target_error import TargetError

    job = _job(target)
    asked = numerics.get("precision")
    chosen = chosen_precision(target, job, asked, faster_in_bf16=faster_in_bf16)
    options = {"precision": chosen.option} if chosen.option is not None else {}
    try:
        found = capture_job(job, optimizer, numerics={**options, **numerics}, check=check)
    except CaptureError as e:
        parsed = parse_target(target.text, target.batch, target.seq, target.settings)
        if isinstance(parsed, ConfigTarget) and (line := forward_refusal(parsed, e)):
            raise TargetError(line) from e
        raise
    return replace(found, precision=chosen.sentence(found.graph))


def _job(target: Target) -> Job:
    from shardwright.train.targets.target import load_job

    return load_job(target.text, target.batch, target.seq, target.settings)


def capture_job(
    job: Job,
    optimizer: str | None = None,
    *,
    numerics: Mapping[str, str] = MappingProxyType({}),
    check: Callable[[int], None] = lambda _: None,
) -> CapturedTarget:
    """Capture the model of a job; `check` rejects too many bytes of weights before the capture.

    The other arguments are those of `capture`.
    """
    from shardwright import api
    from shardwright.tracing.arguments import weight_bytes
    from shardwright.tracing.export.opaque import WeightsNeededError
    from shardwright.train.targets.target import build_model, optimizer_name

    args, kwargs = job.call()
    chosen = {**asdict(job.numerics), **numerics}
    del chosen["fp8"]  # which is of strategies, not of captures
    start = time.perf_counter()
    model = build_model(job, meta=True)
    name = optimizer if optimizer is not None else optimizer_name(job, model)
    weights = weight_bytes(model)
    check(weights)
    try:
        graph = api.capture(model, args, kwargs, **chosen)
    except WeightsNeededError:  # a sub-module that is kept whole must run, so it needs weights
        graph = api.capture(build_model(job), args, kwargs, **chosen)
    return CapturedTarget(lambda: job, graph, name, time.perf_counter() - start, weights)


def avoidable(captured: CapturedTarget, machine: Machine, found: Choice) -> Avoidable:
    """Time of a step that a faster host, or an update in one kernel, would save."""
    return avoidable_time.avoidable(found.plan, captured.graph, machine, found.frontier)


def planned(given: PlanOfTarget, devices: int | None = None) -> tuple[CapturedTarget, Plan]:
    """TARGET captured with the plan's numerics, and the plan, checked against it."""
    numerics = load_plan(given.plan).numerics
    numerics.require_executed()
    captured = capture(given.target, numerics=asdict(numerics))
    return captured, plan_in_file(given.plan, captured, devices)


def machine_of(
    given: MachineOptions, devices: int | None = None, *, tune_host: bool = False
) -> Machine:
    """The named machine with changed figures, reduced to `devices`.

    This host is measured with or without tuning, as the ranks will run.
    """
    return with_figures(_named(given.text, devices, tune_host), **given.figures)


def _named(text: str, devices: int | None, tune_host: bool) -> Machine:
    if text == "here":
        with working("measuring this host") as tell:
            from shardwright.profile.measure import measure_host

            found = measure_host(devices or devices_here(), tell=tell, tune_host=tune_host)
        if found.measured is not None:
            click.echo(wrapped(measurement_age(found, found.measured)), err=True)
        return found
    is_file = text.endswith(".toml") or Path(text).is_file()
    machine = load_machine(text) if is_file else preset(text)
    return machine if devices is None else machine.with_devices(devices)


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


def search(captured: CapturedTarget, machine: Machine, options: PlanOptions = DEFAULTS) -> Frontier:
    """The frontier of one graph on one machine, with the optimizer of the target."""
    options = replace(options, optimizer=captured.optimizer)
    with working(f"searching plans for {machine}") as progress:
        from shardwright.public import search_with

        return search_with(
            captured.graph, machine, options, progress, tracer=captured.tracer(machine)
        )


def frontiers(
    captured: CapturedTarget, machines: Sequence[Machine], options: PlanOptions
) -> tuple[list[tuple[Machine, Frontier]], dict[int, str]]:
    """The frontier of each machine, and by device count why constraints leave some without plans.

    Raises `ConstraintError` if they leave all without plans.
    """
    found: list[tuple[Machine, Frontier]] = []
    reasons: dict[int, str] = {}
    for share, machine in zip(time_shares(options, len(machines)), machines, strict=True):
        try:
            found.append((machine, search(captured, machine, share)))
        except (ConstraintError, PipelineError) as e:
            if machine is machines[-1] and not found:
                raise
            reasons[machine.devices] = str(e)
    return found, reasons


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
    check_limit(machine, options.memory_limit, captured.state_bytes, STATE)
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
    enough = [p for p in parts if limit is None or captured.state_bytes <= limit * p.devices]
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


def smaller_machines(machine: Machine) -> Iterator[Machine]:
    """Machines with one, two, ... devices, as far as they split evenly over the hosts."""
    for devices in range(1, machine.devices + 1):
        with contextlib.suppress(MachineError):
            yield machine.with_devices(devices)


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


def devices_here() -> int:
    """The number of GPUs of this host, or of its cores if it has none."""
    import os

    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def host_faster_in_bf16() -> bool:
    """Whether this host has GPUs with products in bfloat16, before it is measured."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
