"""Options of a search, checked: shared by `sw.plan`, `sw.search` and the commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from shardwright.ir.frontier import parse_limit
from shardwright.ir.layout import Bytes, Mesh
from shardwright.ir.options.constraints import Constraint, ConstraintError, parse_constraints
from shardwright.ir.options.optimizers import known_optimizer
from shardwright.ir.schedules.schedule import PipelineError

METHODS = ("joint", "kcut")
ALL = "all"  # numbers of micro-batches, while more of them save memory
AUTO = "auto"  # numbers of stages, of the best uniform strategies

_STAGES = "(1, 2, 4), None for powers of two, or 'auto' for those of the best strategies on hosts"
_MICRO_BATCHES = f"(1, 2, 4), {ALL!r}, or None for as many as the memory limit asks for"


class OptionsError(ValueError):
    """An option of a search that does not exist, or not with what else is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of a search beside its graph and machine; `of` checks what users give.

    * `optimizer`: a name of `ir/options/optimizers.py`;
    * `method`: "joint", all mesh axes at once, or "kcut", SoyBean's one after the other;
    * `exact`: the exact frontier of the additive costs instead of its supported points;
    * `recompute`: whether segments may run again in the backward pass;
    * `meshes`: the meshes of plans without stages; None is all of one and of two axes;
    * `constraints`: what plans must or must not do;
    * `micro_batches`: numbers that a step may take its batch in; None tries more than one where the
      memory limit makes plans slower or rules all out, "all" for as long as they save memory;
    * `memory_limit`: bytes per rank, or "unlimited"; None is the memory of a device;
    * `stages`: numbers of pipeline stages; None climbs to the best power of two; "auto" searches
      pipelines around the best uniform strategies that have stages, on machines of several hosts.
      `of` gives (1,) instead where other options rule these strategies out;
    * `allow_async`: whether asynchronous pipelines, which change the optimisation, are searched;
    * `loss_chunks`: numbers of chunks of the vocabulary in which the loss is computed; None tries
      more than one where micro-batches would be tried;
    * `mlp_chunks`: numbers of chunks of a rank's rows in which MLPs are computed; None as above;
    * `offload`: whether inputs of recomputed segments and the optimizer's state may wait in the
      memory of the host; None tries inputs where micro-batches would be tried, and state where
      nothing fits else, on accelerators with a link to their host. Unless False, parameters are
      tried there where not even that fits;
    * `whole`: whether what only saves memory (more micro-batches, chunks, memory of the host) is
      searched although the fastest plans fit, as a frontier down to the least memory needs;
    * `points`: plans of the frontier that are kept, at least;
    * `seconds`: about how long to search at most;
    * `processes`: how many processes may search, which all find the same plans.
    """

    optimizer: str = "adamw"
    method: str = "joint"
    exact: bool = False
    recompute: bool = True
    meshes: tuple[Mesh, ...] | None = None
    constraints: tuple[Constraint, ...] = ()
    micro_batches: tuple[int, ...] | str | None = None
    memory_limit: Bytes | str | None = None
    stages: tuple[int, ...] | str | None = AUTO
    allow_async: bool = False
    loss_chunks: tuple[int, ...] | None = None
    mlp_chunks: tuple[int, ...] | None = None
    offload: bool | None = None
    whole: bool = False
    points: int = 48
    seconds: float = math.inf
    processes: int = 1

    @classmethod
    def of(cls, **given: Any) -> PlanOptions:
        """The options that a user gives by name; texts are read, the others have their defaults.

        Raises `OptimizerError`, `OptionsError`, `ConstraintError`, `MemoryLimitError` or
        `PipelineError`, each naming the argument, for a value that it cannot have, and
        `OptionsError` for what contradicts each other.
        """
        if unknown := sorted(given.keys() - _READ.keys()):
            raise TypeError(f"there is no option {unknown[0]!r} of a search")
        options = cls(**{name: _READ[name](name, value) for name, value in given.items()})
        if options.stages == AUTO and not options.are_free:
            options = replace(options, stages=(1,))
        options._require_possible()
        return options

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The numbers of micro-batches that are named; None where none are."""
        return None if isinstance(self.micro_batches, str) else self.micro_batches

    @property
    def are_free(self) -> bool:
        """Whether these options permit a search that starts from any uniform strategy."""
        bound = self.constraints or self.meshes is not None or self.allow_async or self.exact
        return not bound and self.method != "kcut" and self.micro_batches != (1,)

    def _require_possible(self) -> None:
        """Raise `OptionsError` where options contradict each other."""
        if self.method != "kcut":
            return
        plain = not (self.exact or self.constraints or self.allow_async)
        plain &= {*(self.loss_chunks or (1,)), *(self.mlp_chunks or (1,))} == {1}
        one = len(self.meshes or ()) <= 1
        if not (plain and one) or {*(self.micro_batches or (1,)), *(self.stages or (0,))} != {1}:
            raise OptionsError(
                "method 'kcut' cuts one mesh, is not `exact` and takes no constraints, no"
                " micro-batches, no stages, no chunks of the loss or of MLPs and no `allow_async`;"
                " leave these out"
            )


def _method(name: str, value: object) -> object:
    if value not in METHODS:
        raise OptionsError(f"{name} {value!r} is not known; choose one of {', '.join(METHODS)}")
    return value


def _switch(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise OptionsError(f"{name}={value!r} is not known; give True or False")
    return value


def _meshes(name: str, value: object) -> tuple[Mesh, ...] | None:
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        raise ConstraintError(f"{name} is {value!r}; give a list, as [Mesh.parse('dp=4 tp=2')]")
    for mesh in value:
        if not isinstance(mesh, Mesh):
            raise ConstraintError(f"{mesh!r} is no Mesh; write it as Mesh.parse('dp=4 tp=2')")
    return tuple(value)


def _micro_batches(name: str, value: object) -> object:
    if value is None or value == ALL:
        return value
    if isinstance(value, str):
        raise OptionsError(f"{name}={value!r} is not known; give numbers such as {_MICRO_BATCHES}")
    return _counts(name, value, OptionsError, _MICRO_BATCHES)


def _chunks(name: str, value: object) -> object:
    return None if value is None else _counts(name, value, OptionsError, "(1, 8), or None")


def _stages(name: str, value: object) -> object:
    return value if value in (None, AUTO) else _counts(name, value, PipelineError, _STAGES)


def _counts(name: str, counts: object, error: type[ValueError], example: str) -> tuple[int, ...]:
    """Whole numbers of at least 1; raises `error` for anything else."""
    if isinstance(counts, str) or not isinstance(counts, Sequence | set | frozenset) or not counts:
        raise error(f"{name}={counts!r} is no list of counts; give {example}")
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise error(
                f"{name}={counts!r}: {count!r} is no whole number of at least 1; give {example}"
            )
    return tuple(counts)


def _offload(name: str, value: object) -> object:
    return None if value is None else _switch(name, value)


def _points(name: str, value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise OptionsError(f"{name}={value!r} is no number of plans; give both ends, 2, or more")
    return value


def _seconds(name: str, value: object) -> object:
    if not isinstance(value, Real) or math.isnan(value) or value < 0:
        raise OptionsError(f"{name}={value!r} is no time to search; give 0 or more")
    return value


def _processes(name: str, value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionsError(f"{name}={value!r} is no number of processes; give 1 or more")
    return value


_READ: Mapping[str, Callable[[str, Any], Any]] = {
    "optimizer": lambda _, value: known_optimizer(value),
    "method": _method,
    "exact": _switch,
    "recompute": _switch,
    "meshes": _meshes,
    "constraints": lambda _, value: parse_constraints(value),
    "micro_batches": _micro_batches,
    "memory_limit": lambda _, value: None if value is None else parse_limit(value),
    "stages": _stages,
    "allow_async": _switch,
    "loss_chunks": _chunks,
    "mlp_chunks": _chunks,
    "offload": _offload,
    "points": _points,
    "seconds": _seconds,
    "processes": _processes,
}
DEFAULTS = PlanOptions()
