"""Checks that the parts of a plan that was read belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shardwright.ir.plan import Plan
from shardwright.ir.schedules.registry import schedule_named

_MOST_DEVICES = 2**20


def check_consistent(plan: Plan) -> None:
    """Raise `ValueError`, in one line, for a plan that no search makes.

    Forms, signs and finiteness of single fields are checked where they are read.
    """
    if plan.mesh.size > _MOST_DEVICES:
        raise ValueError(f"a mesh of {plan.mesh.size} devices, at most {_MOST_DEVICES} are planned")
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
        for step in transfer.collectives:
            _, _, axis = step.partition(" ")
            if axis not in plan.layout_mesh.names:
                raise ValueError(f"a collective {step!r} along no axis of {plan.layout_mesh}")


def _check_distinct(what: str, names: Iterable[str]) -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"two {what} called {repeated[0]!r}")
