"""A plan: one way to train one graph in parallel, with what it is expected to cost.

A plan file is data. Reading one checks every field and runs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shardwright.ir.graph import Source
from shardwright.ir.layout import Bytes, Layout, LayoutError, Mesh, Seconds

T = TypeVar("T")

FORMAT = 1  # of plan files; raised when an older reader would misread them


class PlanError(ValueError):
    """A plan that cannot be read, or that does not belong to what it is used with."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor that the model is called with. `key` is its path: `args.0`, `kwargs.labels`."""

    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """What one operator does under the plan.

    `tiling` names the split factor of its rule per mesh axis ("-" where every
    device computes all of it), `splits` the same in words ("batch", "heads",
    "features (sum)"); `layout` is how its first result lies.
    """

    name: str
    target: str
    source: Source
    tiling: tuple[str, ...]
    splits: tuple[str, ...]
    layout: Layout
    seconds: Seconds  # forward and backward, on the slowest rank
    saved_bytes: Bytes  # kept for the backward pass, per rank


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """How one parameter is stored between steps."""

    name: str
    layout: Layout
    bytes: Bytes  # weight, gradient and optimizer state, per rank
    seconds: Seconds  # optimizer update, per rank


@dataclass(frozen=True, slots=True)
class Transfer:
    """One redistribution that an edge needs, in one direction."""

    value: str
    consumer: str
    backward: bool
    collectives: tuple[str, ...]  # such as "all_reduce tp", in the order they run
    bytes: Bytes  # of the largest tile that takes part
    seconds: Seconds


@dataclass(frozen=True)
class Plan:
    """Everything `parallelize` needs, and everything `explain` says.

    `step_seconds` is one optimizer step, `peak_bytes` the memory of the worst
    rank, `lower_bound_seconds` a time that no plan of the same cost model
    within the same memory can beat.
    """

    fingerprint: str
    machine: str
    mesh: Mesh
    optimizer: str
    step_seconds: Seconds
    peak_bytes: Bytes
    lower_bound_seconds: Seconds
    inputs: tuple[InputSpec, ...]
    constants: tuple[tuple[str, Any], ...]  # arguments of the call that are no tensors
    parameters: tuple[PlannedParameter, ...]
    ops: tuple[PlannedOp, ...]
    transfers: tuple[Transfer, ...]
    name: str = "searched"  # or the baseline it is: "data parallel", ...
    stages: int = 1
    schedule: str = "none"
    notes: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Layout of every parameter, by its name in the module, and of every operator's result."""
        found = {op.name: op.layout for op in self.ops}
        found.update((p.name, p.layout) for p in self.parameters)
        return found

    @property
    def tilings(self) -> Mapping[str, tuple[str, ...]]:
        return {op.name: op.tiling for op in self.ops}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON: aside first, then renamed, so a reader never sees half of it."""
        target = Path(path)
        aside = target.with_name(target.name + f".{os.getpid()}.tmp")
        try:
            aside.write_text(self.to_json() + "\n")
            os.replace(aside, target)
        except OSError as e:
            aside.unlink(missing_ok=True)
            raise PlanError(f"cannot write plan {target}: {e.strerror}; choose another path") from e

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file; raises `PlanError` for anything that is not a whole, valid plan."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or e
            raise PlanError(
                f"cannot read plan {path}: {reason}; give a file that `plan` wrote"
            ) from e
        try:
            return cls.from_json(text)
        except PlanError as e:
            raise PlanError(f"plan {path}: {e}") from e

    def to_json(self) -> str:
        """The plan as readable JSON text."""
        return _dump(
            {
                "format": FORMAT,
                "name": self.name,
                "fingerprint": self.fingerprint,
                "machine": self.machine,
                "mesh": str(self.mesh),
                "stages": self.stages,
                "schedule": self.schedule,
                "optimizer": self.optimizer,
                "step_seconds": self.step_seconds,
                "peak_bytes": self.peak_bytes,
                "lower_bound_seconds": self.lower_bound_seconds,
                "notes": list(self.notes),
                "inputs": [[i.key, list(i.shape), i.dtype] for i in self.inputs],
                "constants": [[key, value] for key, value in self.constants],
                "parameters": [
                    [p.name, str(p.layout), p.bytes, p.seconds] for p in self.parameters
                ],
                "ops": [
                    [
                        op.name,
                        op.target,
                        " ".join(op.tiling),
                        ", ".join(op.splits),
                        str(op.layout),
                        op.seconds,
                        op.saved_bytes,
                        op.source.module,
                        op.source.file,
                        op.source.line,
                    ]
                    for op in self.ops
                ],
                "transfers": [
                    [
                        t.value,
                        t.consumer,
                        "backward" if t.backward else "forward",
                        ", ".join(t.collectives),
                        t.bytes,
                        t.seconds,
                    ]
                    for t in self.transfers
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise PlanError(f"is not JSON ({e}); it is corrupt or cut short, plan again") from e
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise PlanError("has no format number; give a file that `plan` wrote")
        if data["format"] > FORMAT:
            raise PlanError(
                f"has format {data['format']}, this version reads up to {FORMAT};"
                " upgrade shardwright or plan again"
            )
        try:
            return _read(data)
        except LayoutError as e:
            raise PlanError(f"{e}; edit it back or plan again") from e
        except KeyError as e:
            raise PlanError(f"lacks the field {e}; it is damaged, plan again") from e
        except (TypeError, ValueError, OverflowError) as e:
            raise PlanError(
                f"has a field of the wrong form ({e}); edit it back or plan again"
            ) from e

    def explain(self) -> str:
        """Who is sharded how, in the module's own names, and what it costs."""
        from shardwright.ir.explain import explain

        return explain(self)

    def __str__(self) -> str:
        peak = self.peak_bytes / 2**20
        size = f"{peak / 1024:.2f} GiB" if peak >= 1024 else f"{peak:.4g} MiB"
        return (
            f"{self.name}: {self.mesh} on {self.machine}, {self.step_seconds * 1e3:.2f} ms/step,"
            f" {size}/rank"
        )


def _read(data: dict[str, Any]) -> Plan:
    mesh = Mesh.parse(_is(data["mesh"], str))
    constants = tuple((_is(k, str), _plain(v)) for k, v in data["constants"])
    return Plan(
        name=_is(data["name"], str),
        fingerprint=_is(data["fingerprint"], str),
        machine=_is(data["machine"], str),
        mesh=mesh,
        stages=_is(data["stages"], int),
        schedule=_is(data["schedule"], str),
        optimizer=_is(data["optimizer"], str),
        step_seconds=Seconds(_number(data["step_seconds"])),
        peak_bytes=Bytes(_is(data["peak_bytes"], int)),
        lower_bound_seconds=Seconds(_number(data["lower_bound_seconds"])),
        notes=tuple(_is(note, str) for note in data["notes"]),
        inputs=tuple(
            InputSpec(_is(key, str), tuple(_is(n, int) for n in shape), _is(dtype, str))
            for key, shape, dtype in data["inputs"]
        ),
        constants=constants,
        parameters=tuple(
            PlannedParameter(
                _is(name, str),
                Layout.parse(_is(layout, str), mesh),
                Bytes(_is(size, int)),
                Seconds(_number(seconds)),
            )
            for name, layout, size, seconds in data["parameters"]
        ),
        ops=tuple(
            PlannedOp(
                _is(name, str),
                _is(target, str),
                Source(_is(module, str), _is(file, str), _is(line, int)),
                _per_axis(_is(tiling, str).split(), mesh),
                _per_axis(_is(splits, str).split(", "), mesh),
                Layout.parse(_is(layout, str), mesh),
                Seconds(_number(seconds)),
                Bytes(_is(saved, int)),
            )
            for name, target, tiling, splits, layout, seconds, saved, module, file, line in (
                data["ops"]
            )
        ),
        transfers=tuple(
            Transfer(
                _is(value, str),
                _is(consumer, str),
                _is(phase, str) == "backward",
                tuple(_is(names, str).split(", ")),
                Bytes(_is(size, int)),
                Seconds(_number(seconds)),
            )
            for value, consumer, phase, names, size, seconds in data["transfers"]
        ),
    )


def _is(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} where a {kind.__name__} is needed")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise TypeError(f"{value!r} where a number of at least 0 is needed")
    return float(value)


def _plain(value: Any) -> Any:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{value!r} where a plain constant is needed")
    return value


def _per_axis(words: list[str], mesh: Mesh) -> tuple[str, ...]:
    if len(words) != len(mesh.axes):
        raise ValueError(f"{words} for mesh {mesh} of {len(mesh.axes)} axes")
    return tuple(words)


def _dump(data: dict[str, Any]) -> str:
    """JSON with one row of a table per line: short enough to read, easy to diff."""
    lines = []
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows = ",\n".join("  " + json.dumps(row) for row in value)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"
