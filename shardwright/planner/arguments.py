"""Checks the arguments of a search that are known before capture.

Commands and `shardwright.plan` check here first, so that a mistake shows before torch is imported
and before a model is captured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

from shardwright.ir.constraints import Constraint, ConstraintError, parse_constraints
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import PipelineError
from shardwright.machine.model import Machine
from shardwright.planner.micro_batch_counts import ALL
from shardwright.planner.permitted import meshes_by_groups, stages_asked
from shardwright.rules.micro_batches import MicroBatchError, require_pieces

METHODS = ("joint", "kcut")
_MOST_STAGES = 64  # that are tried when nobody says how many


class MethodError(ValueError):
    """A way of searching that does not exist, or not with what else is asked for."""


class GraphError(ValueError):
    """What is to be searched is no graph."""


def require_graph(given: object) -> None:
    """Raise `GraphError` unless it is a `Graph`."""
    if not isinstance(given, Graph):
        raise GraphError(
            f"graph is a {type(given).__name__}; give what sw.capture(model, args) returns"
        )


@dataclass(frozen=True)
class Asked:
    """Which meshes and pipelines a search tries: `chosen` are those of plans without stages.

    With `every` all numbers of groups are tried.
    """

    groups: Sequence[int]
    meshes: Sequence[Mesh] | None
    chosen: Sequence[Mesh]
    wanted: Sequence[Constraint]
    every: bool
    allow_async: bool


def check_arguments(
    machine: Machine,
    constraints: Sequence[str | Constraint] = (),
    stages: Sequence[int] | None = (1,),
    meshes: Sequence[Mesh] | None = None,
    *,
    method: str = "joint",
    exact: bool = False,
    recompute: bool = True,
    micro_batches: Sequence[int] | str | None = None,
    allow_async: bool = False,
    seconds: float = math.inf,
    batch: int | None = None,
) -> Asked:
    """What these arguments of `search` ask for on `machine`; `batch` has so many samples.

    Raises `ConstraintError`, `PipelineError`, `MethodError` or `MicroBatchError`, naming the
    argument, for what its devices cannot be and for what contradicts each other.
    """
    _check_counts("stages", stages, PipelineError, "(1, 2, 4), or None for all powers of two")
    if isinstance(micro_batches, str):
        if micro_batches != ALL:
            raise MicroBatchError(
                f"micro_batches={micro_batches!r} is not known; give numbers such as (1, 2, 4),"
                f" {ALL!r}, or None for as many as the memory limit asks for"
            )
    else:
        _check_counts(
            "micro_batches",
            micro_batches,
            MicroBatchError,
            f"(1, 2, 4), {ALL!r}, or None for as many as the memory limit asks for",
        )
        if batch is not None and micro_batches is not None:
            for count in micro_batches if min(micro_batches) > batch else ():
                require_pieces(batch, count)
    switches = {"exact": exact, "recompute": recompute, "allow_async": allow_async}
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise MethodError(f"{name}={switch!r} is not known; give True or False")
    for mesh in _meshes(meshes):
        if not isinstance(mesh, Mesh):
            raise ConstraintError(f"{mesh!r} is no Mesh; write it as Mesh.parse('dp=4 tp=2')")
    if not isinstance(seconds, Real) or math.isnan(seconds) or seconds < 0:
        raise MethodError(f"seconds={seconds!r} is no time to search; give 0 or more")
    if method not in METHODS:
        raise MethodError(f"method {method!r} is not known; choose one of {', '.join(METHODS)}")
    if method == "kcut":
        plain = not (exact or constraints or allow_async) and len(meshes or ()) <= 1
        if not plain or {*(micro_batches or (1,)), *(stages or (0,))} != {1}:
            raise MethodError(
                "method 'kcut' cuts one mesh, is not `exact` and takes no constraints, no"
                " micro-batches, no stages and no `allow_async`; leave these out"
            )
    wanted = parse_constraints(constraints)
    groups = _stages_of(machine, stages_asked(wanted, stages))
    chosen = meshes_by_groups(machine.devices, groups, wanted, meshes)
    every = stages is not None
    if allow_async and stages is not None and tuple(stages) == (1,):
        every = False  # to allow them and to try none would be odd
        groups = _stages_of(machine, None)
    return Asked(groups, meshes, chosen, wanted, every, allow_async)


def _meshes(given: object) -> Iterable[object]:
    if given is not None and not isinstance(given, tuple | list):
        raise ConstraintError(f"meshes is {given!r}; give a list, as [Mesh.parse('dp=4 tp=2')]")
    return given or ()


def _check_counts(name: str, counts: object, error: type[ValueError], example: str) -> None:
    """Raise `error` unless `counts` is None or a list of whole numbers of at least 1."""
    if counts is None:
        return
    if not isinstance(counts, Sequence | set | frozenset | range) or not counts:
        raise error(f"{name}={counts!r} is no list of counts; give {example}")
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise error(
                f"{name}={counts!r}: {count!r} is no whole number of at least 1; give {example}"
            )


def _stages_of(machine: Machine, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of stages to search; raises `PipelineError` for those that devices cannot be."""
    devices = machine.devices
    if wanted is None:
        powers = (2**i for i in range(_MOST_STAGES.bit_length()))
        return tuple(count for count in powers if devices % count == 0)
    for count in wanted:
        if devices % count:
            raise PipelineError(
                f"{count} stages cannot share the {devices} devices of {machine.name} evenly; take"
                " a divisor of that"
            )
    return tuple(sorted(set(wanted)))
