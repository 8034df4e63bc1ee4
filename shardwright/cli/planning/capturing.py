"""Captures the model of TARGET, or reads its capture from the user's cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from shardwright.cli.console import working
from shardwright.ir.graph import Graph
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.fp8 import recipe_of
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.planner.memory_limits import check_weights
from shardwright.rules.operators.fp8_layers import with_fp8
from shardwright.train.targets.capture_cache import (
    CachedCapture,
    capture_key,
    keep_capture,
    kept_capture,
)
from shardwright.train.targets.config_values import unnamed_sizes
from shardwright.train.targets.target_text import ConfigTarget, Target, parse_target
from shardwright.train.targets.trace_cache import KeptTraces, new_tracer

if TYPE_CHECKING:
    from shardwright.train.job import Job


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
        unnamed: sizes of the model that its config does not name.
    """

    load: Callable[[], Job]
    graph: Graph
    optimizer: str
    seconds: float
    weight_bytes: int = 0
    precision: str = ""
    key: str = ""
    unnamed: tuple[str, ...] = ()
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

    def state_bytes(self, machine: Machine, options: PlanOptions) -> int:
        """Bytes of weights, gradients and optimizer state; some rank holds an even share."""
        from shardwright.planner.memory_limits import least_state_bytes

        return least_state_bytes(self.graph, machine, options)


def capture(
    target: Target,
    optimizer: str | None = None,
    *,
    numerics: Mapping[str, str] = MappingProxyType({}),
    machine: Machine | None = None,
    memory_limit: int | str | None = None,
    fast_halves: tuple[str, ...] = (),
) -> CapturedTarget:
    """Load TARGET and capture its model, on the meta device if it can be built there.

    The capture of a `config.json` is read from the user's cache if it is there, else kept there.

    `numerics` override those of the job, and the precision of a config's dtype. With `machine`,
    weights that its devices cannot hold within `memory_limit` are rejected before the capture.
    """

    def checked(weight_bytes: int) -> None:
        if machine is not None:
            check_weights(machine, memory_limit, weight_bytes, PlanOptions())

    with working(f"capturing {target.text}"):
        parsed = parse_target(target.text, target.batch, target.seq, target.settings)
        given = target, optimizer, numerics, checked
        make = partial(_captured, *given, fast_halves=fast_halves)
        if not isinstance(parsed, ConfigTarget):
            return make()
        if target.cached:
            key = capture_key(parsed, numerics, optimizer, fast_halves=fast_halves)
            found = kept_or_made(key, partial(_job, target), make, checked)
        else:
            found = make()
        return replace(found, unnamed=unnamed_sizes({**parsed.content, **parsed.given}))


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
    fast_halves: tuple[str, ...],
) -> CapturedTarget:
    """Capture the model of a target without the cache."""
    from shardwright.tracing.call import CaptureError
    from shardwright.train.targets.hf_config import forward_refusal
    from shardwright.train.targets.precision import chosen_precision
    from shardwright.train.targets.target_error import TargetError

    job = _job(target)
    asked = numerics.get("precision")
    chosen = chosen_precision(target, job, asked, fast_halves=fast_halves)
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
    recipe = recipe_of(chosen.pop("fp8"))  # of the strategy that the graph was priced with
    start = time.perf_counter()
    model = build_model(job, meta=True)
    name = optimizer if optimizer is not None else optimizer_name(job, model)
    weights = weight_bytes(model)
    check(weights)
    try:
        graph = api.capture(model, args, kwargs, **chosen)
    except WeightsNeededError:  # a sub-module that is kept whole must run, so it needs weights
        graph = api.capture(build_model(job), args, kwargs, **chosen)
    graph = graph if recipe is None else with_fp8(graph, recipe)
    return CapturedTarget(lambda: job, graph, name, time.perf_counter() - start, weights)
