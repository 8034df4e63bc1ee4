"""Checks that the parts of a plan that was read belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shardwright.ir.plan import Plan
from shardwright.ir.schedules.registry import schedule_named

_MOST_DEVICES = 2**20
_MOST_MICRO_BATCHES = 2**20
_ROUNDING = 1e-6  # of sums of seconds, relative


def check_consistent(plan: Plan) -> None:
    """Raise `ValueError`, in one line, for a plan that no search makes.

    Forms, signs and finiteness of single fields are checked where they are read.
    """
    if plan.mesh.size > _MOST_DEVICES:
        raise ValueError(f"a mesh of {plan.mesh.size} devices, at most {_MOST_DEVICES} are planned")
    if plan.micro_batches > _MOST_MICRO_BATCHES:
        raise ValueError(f"{plan.micro_batches} micro-batches, at most {_MOST_MICRO_BATCHES}")
    _check_totals(plan)
    _check_distinct("operators", (op.name for op in plan.ops))
    _check_distinct("parameters", (parameter.name for parameter in plan.parameters))
    _check_distinct("inputs", (given.key for given in plan.inputs))
    _check_distinct("constants", (key for key, _ in plan.constants))
    names = {op.name for op in plan.ops}
    for cut in plan.cuts:
        if cut not in names:
            raise ValueError(f"a stage that begins with {cut!r}, which is no operator")
    _check_distinct("cuts", plan.cuts)
    if plan.pipeline is not None:
        schedule_named(plan.schedule)
    for op in plan.ops:
        if op.backward_seconds > op.seconds:
            raise ValueError(f"{op.name!r} takes longer backward than forward and backward")
    for transfer in plan.transfers:
        if transfer.consumer and transfer.consumer not in names:
            raise ValueError(f"a transfer to {transfer.consumer!r}, which is no operator")
        for step in transfer.collectives:
            _, _, axis = step.partition(" ")
            if axis not in plan.layout_mesh.names:
                raise ValueError(f"a collective {step!r} along no axis of {plan.layout_mesh}")


def _check_totals(plan: Plan) -> None:
    """Check that the seconds and bytes of the step are those of its parts."""
    seconds, most = plan.step_seconds, plan.step_seconds * (1 + _ROUNDING)
    if plan.lower_bound_seconds > most:
        bound = plan.lower_bound_seconds
        raise ValueError(f"a lower bound of {bound} seconds above the step's {seconds}")
    timeline = plan.timeline
    # Steps of an asynchronous pipeline overlap in its timeline.
    whole = timeline is not None and not plan.is_asynchronous
    if timeline is not None and whole and abs(timeline.seconds - seconds) > most - seconds:
        raise ValueError(f"a step of {seconds} seconds whose tasks end after {timeline.seconds}")
    if plan.memory is not None and plan.memory.peak != plan.peak_bytes:
        raise ValueError(f"a peak of {plan.peak_bytes} bytes with parts of {plan.memory.peak}")
    overlaps = plan.overlap, plan.gather_overlap or 0.0
    if max(overlaps) > 1:
        raise ValueError(f"an overlap of {max(overlaps)}, which is a part from 0 to 1")


def _check_distinct(what: str, names: Iterable[str]) -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"two {what} called {repeated[0]!r}")
