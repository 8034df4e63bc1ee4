"""Reads and writes plans as JSON with one table row per line.

Reading checks every field and runs nothing. Fields that older versions did not write may be
missing: `shares` (module or null, part of the memory, bytes) are then not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from shardwright.ir.graph import Source
from shardwright.ir.layout import Bytes, Layout, LayoutError, Mesh, Seconds
from shardwright.ir.memory import PARTS, Memory, Moment, Share
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.pipeline import NONE, stage_mesh
from shardwright.ir.plan import (
    FORMAT,
    InputSpec,
    Phase,
    Plan,
    PlanError,
    PlannedOp,
    PlannedParameter,
    PlannedTransfer,
    Remark,
    RemarkKind,
    Rival,
)
from shardwright.ir.redistribution import communication_named
from shardwright.ir.strategy.fields import OFFLOADS, SYNCS
from shardwright.plan_io.checks import at_least_one as _at_least_one
from shardwright.plan_io.checks import constant as _constant
from shardwright.plan_io.checks import number as _number
from shardwright.plan_io.checks import of_type as _is
from shardwright.plan_io.checks import packed_constant
from shardwright.plan_io.checks import size as _size
from shardwright.plan_io.consistency import check_consistent
from shardwright.plan_io.timeline_text import timeline_of, timeline_tables

_STORED = ("kept", "regathered")
_COPIES_OF_RECOMPUTED = 3  # the first format whose recomputed operators read kept copies
_TOTALS = tuple(f.name for f in fields(Memory) if f.name not in ("shares", "curve"))


def plan_to_json(plan: Plan) -> str:
    """The plan as readable JSON text."""
    groups = plan.update_group_bytes
    return _dump(
        {
            "format": _format(plan),
            "name": plan.name,
            "fingerprint": plan.fingerprint,
            "machine": plan.machine,
            "mesh": str(plan.mesh),
            "stages": plan.stages,
            "schedule": plan.schedule,
            "cuts": list(plan.cuts),
            "ways": list(plan.receive_seconds),
            "micro_batches": plan.micro_batches,
            **({} if plan.gradient_sync is None else {"gradient_sync": plan.gradient_sync}),
            **({"async_tp": True} if plan.async_tp else {}),
            **({"ep_overlap": True} if plan.ep_overlap else {}),
            **({"compiled": True} if plan.compiled else {}),
            **({} if plan.ahead == 1 else {"ahead": plan.ahead}),
            **({"separates_gathers": True} if plan.separates_gathers else {}),
            **({"offload": list(plan.offload)} if plan.offload else {}),
            **({"on_device": list(plan.on_device)} if plan.on_device else {}),
            **({} if groups is None else {"update_group_bytes": groups}),
            "optimizer": plan.optimizer,
            "step_seconds": plan.step_seconds,
            "peak_bytes": plan.peak_bytes,
            "memory": None if plan.memory is None else _totals(plan.memory),
            "lower_bound_seconds": plan.lower_bound_seconds,
            "overlap": plan.overlap,
            **({} if plan.gather_overlap is None else {"gather_overlap": plan.gather_overlap}),
            "contention": plan.contention,
            **({"expert_skew": plan.expert_skew} if plan.expert_skew else {}),
            **({"host_devices": plan.host_devices} if plan.host_devices else {}),
            **({"useful_seconds": plan.useful_seconds} if plan.useful_seconds else {}),
            **({"dtype": plan.dtype} if plan.dtype else {}),
            **asdict(plan.numerics),
            **({"chosen_precision": plan.chosen_precision} if plan.chosen_precision else {}),
            "notes": list(plan.notes),
            "remarks": [_remark_row(remark) for remark in plan.remarks],
            "rivals": [_rival_row(rival) for rival in plan.rivals],
            "inputs": [_input_row(given) for given in plan.inputs],
            "constants": [[key, packed_constant(value)] for key, value in plan.constants],
            "parameters": [_parameter_row(parameter) for parameter in plan.parameters],
            "ops": [_op_row(op) for op in plan.ops],
            "reads": [[op.name, *op.reads] for op in plan.ops],
            "transfers": [_transfer_row(transfer) for transfer in plan.transfers],
            "shares": [] if plan.memory is None else [list(share) for share in plan.memory.shares],
            **_curve_table(plan.memory),
            **({} if plan.timeline is None else timeline_tables(plan.timeline)),
        }
    )


def plan_from_json(text: str) -> Plan:
    """The plan that `plan_to_json` wrote; raises `PlanError` for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise PlanError(f"is not JSON ({e}); it is corrupt or cut short, plan again") from e
    if not isinstance(data, dict) or type(data.get("format")) is not int or data["format"] < 1:
        raise PlanError("has no format number; give a file that `plan` wrote")
    if data["format"] > FORMAT:
        raise PlanError(
            f"has format {data['format']}, this version reads up to {FORMAT};"
            " upgrade shardwright or plan again"
        )
    try:
        plan = _read(data)
        check_consistent(plan)
        return plan
    except LayoutError as e:
        raise PlanError(f"{e}; edit it back or plan again") from e
    except KeyError as e:
        raise PlanError(f"lacks the field {e}; it is damaged, plan again") from e
    except (TypeError, ValueError, IndexError, OverflowError) as e:
        raise PlanError(f"has a field of the wrong form ({e}); edit it back or plan again") from e


def _totals(memory: Memory) -> dict[str, int | str]:
    return {name: getattr(memory, name) for name in _TOTALS}


def _curve_table(memory: Memory | None) -> dict[str, Any]:
    """The table `curve`, if there is one: a row for each moment of a step."""
    return {"curve": [list(one) for one in memory.curve]} if memory and memory.curve else {}


def _moment(row: list[Any]) -> Moment:
    what, *sizes = row
    if len(sizes) != len(Moment._fields) - 1:
        raise ValueError(f"a moment of {len(sizes)} sizes")
    return Moment(_is(what, str), *(Bytes(_size(one)) for one in sizes))


def _memory(data: Any, rows: list[Any], curve: list[Any]) -> Memory | None:
    """The memory with what modules have of it; files of older versions do not say that."""
    if data is None:
        return None
    since = {"libraries": 0, "reserved": 0, "host": 0}  # which files of older versions do not have
    found: dict[str, Any] = {
        name: _is(data[name], str) if name == "at" else _size({**since, **data}[name])
        for name in _TOTALS
    }
    shares = tuple(_share(*row) for row in rows)
    memory = Memory(**found, shares=shares, curve=tuple(_moment(row) for row in curve))
    if shares and Memory.of(shares, rank=0, at="").parts() != memory.parts():
        raise ValueError("shares of modules that do not add up to the memory")
    return memory


def _numerics(data: dict[str, Any]) -> Numerics:
    """The numerics; files of older versions lack some, which then have their defaults.

    Plans without a word on `logits` are older than `fused`, and run on the graph they were made on.
    """
    given: dict[str, Any] = {
        f.name: _is(data[f.name], type(f.default)) for f in fields(Numerics) if f.name in data
    }
    return Numerics(**{"logits": "model", **given})


def _sync(word: Any) -> str | None:
    if word not in (None, *SYNCS):
        raise ValueError(f"gradient_sync {word!r}, which is none of {', '.join(SYNCS)}")
    return None if word is None else str(word)


def _group_bytes(size: Any) -> Bytes | None:
    return None if size is None else Bytes(_size(size))


def _offload(words: list[Any]) -> tuple[str, ...]:
    if tuple(words) != tuple(word for word in OFFLOADS if word in words):
        raise ValueError(f"offload {words!r}, which is not some of {', '.join(OFFLOADS)}")
    return tuple(words)


def _share(module: Any, part: Any, size: Any) -> Share:
    if _is(part, str) not in PARTS:
        raise ValueError(f"a share of {part!r}, which is no part of the memory")
    return Share(None if module is None else _is(module, str), part, Bytes(_at_least_one(size)))


def _read(data: dict[str, Any]) -> Plan:
    whole_mesh = Mesh.parse(_is(data["mesh"], str))
    schedule = _is(data["schedule"], str)
    mesh = whole_mesh if schedule == NONE else stage_mesh(whole_mesh)
    cuts, receive_seconds = _stages(data)
    ops = _rows(data, "ops")
    reads = _rows(data, "reads", [[row[0]] for row in ops])
    transfers = tuple(_transfer(row) for row in _rows(data, "transfers"))
    again = _gathered_again(transfers) if data["format"] < _COPIES_OF_RECOMPUTED else frozenset()
    return Plan(
        name=_is(data["name"], str),
        fingerprint=_is(data["fingerprint"], str),
        machine=_is(data["machine"], str),
        mesh=whole_mesh,
        stages=len(cuts) + 1,
        schedule=schedule,
        cuts=cuts,
        receive_seconds=receive_seconds,
        micro_batches=_at_least_one(data.get("micro_batches", 1)),
        gradient_sync=_sync(data.get("gradient_sync")),
        async_tp=_is(data.get("async_tp", False), bool),
        ep_overlap=_is(data.get("ep_overlap", False), bool),
        compiled=_is(data.get("compiled", False), bool),
        ahead=_at_least_one(data.get("ahead", 1)),
        separates_gathers=_is(data.get("separates_gathers", False), bool),
        offload=_offload(_rows(data, "offload", [])),
        on_device=tuple(_at_least_one(number) for number in _rows(data, "on_device", [])),
        update_group_bytes=_group_bytes(data.get("update_group_bytes")),
        optimizer=_is(data["optimizer"], str),
        step_seconds=Seconds(_number(data["step_seconds"])),
        peak_bytes=Bytes(_size(data["peak_bytes"])),
        memory=_memory(data.get("memory"), _rows(data, "shares", []), _rows(data, "curve", [])),
        timeline=timeline_of(data["tracks"], data["tasks"]) if "tasks" in data else None,
        lower_bound_seconds=Seconds(_number(data["lower_bound_seconds"])),
        overlap=_number(data.get("overlap", 0.0)),
        gather_overlap=None if "gather_overlap" not in data else _number(data["gather_overlap"]),
        contention=_number(data.get("contention", 1.0)),
        expert_skew=_number(data.get("expert_skew", 0.0)),
        host_devices=_size(data.get("host_devices", 0)),
        useful_seconds=Seconds(_number(data.get("useful_seconds", 0.0))),
        dtype=_is(data.get("dtype", ""), str),
        numerics=_numerics(data),
        chosen_precision=_is(data.get("chosen_precision", ""), str),
        notes=tuple(_is(note, str) for note in _rows(data, "notes")),
        remarks=tuple(_remark(row) for row in _rows(data, "remarks", [])),
        inputs=tuple(_input(row) for row in _rows(data, "inputs")),
        constants=tuple(
            (_is(key, str), _constant(value)) for key, value in _rows(data, "constants")
        ),
        rivals=tuple(_rival(row) for row in _rows(data, "rivals", [])),
        parameters=tuple(_parameter(row, mesh, again) for row in _rows(data, "parameters")),
        ops=tuple(_op(row, read, mesh) for row, read in zip(ops, reads, strict=True)),
        transfers=transfers,
    )


def _format(plan: Plan) -> int:
    """The oldest format whose readers understand a plan."""
    read_again = {value for op in plan.ops if op.segment for value in op.reads}
    copied = read_again & {one.value for one in plan.transfers if one.phase is Phase.FORWARD}
    if any(one.name in copied and not one.regathered for one in plan.parameters):
        return _COPIES_OF_RECOMPUTED
    # Readers of format 1 take the ranks of every stage for neighbours.
    return 1 if plan.layout_mesh.pipeline is None else 2


def _gathered_again(transfers: Iterable[PlannedTransfer]) -> frozenset[str]:
    """The values that the backward pass redistributes again."""
    return frozenset(one.value for one in transfers if one.phase is Phase.RECOMPUTE)


def _rows(data: dict[str, Any], key: str, default: list[Any] | None = None) -> list[Any]:
    """The table `key`; `default` where an older version wrote none, else `KeyError`."""
    return _is(data[key] if default is None else data.get(key, default), list)


def _stages(data: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Seconds, ...]]:
    """The cuts between stages, and the seconds to receive what each stage but the first is sent."""
    cuts = tuple(_is(name, str) for name in _rows(data, "cuts", []))
    if _is(data["stages"], int) != len(cuts) + 1:
        raise ValueError(f"{data['stages']} stages with {len(cuts)} cuts between them")
    receive_seconds = tuple(Seconds(_number(way)) for way in _rows(data, "ways", []))
    if len(receive_seconds) not in (0, len(cuts)):
        raise ValueError(f"{len(receive_seconds)} ways into the stages behind {len(cuts)} cuts")
    return cuts, receive_seconds


# Rows of tables, each written by one function and read by the next.


def _remark_row(remark: Remark) -> list[Any]:
    return [remark.kind.value, remark.what, remark.text, remark.count, " ".join(remark.ops)]


def _remark(row: list[Any]) -> Remark:
    kind, what, text, count, names = row
    ops = tuple(_is(names, str).split())
    return Remark(RemarkKind(kind), _is(what, str), _is(text, str), ops, _size(count))


def _rival_row(rival: Rival) -> list[Any]:
    row = [rival.name, rival.devices, rival.step_seconds, rival.peak_bytes]
    return [*row, *([True] if rival.is_simulated else [])]


def _rival(row: list[Any]) -> Rival:
    name, devices, seconds, size, *simulated = row
    times, simulated = Seconds(_number(seconds)), [_is(one, bool) for one in simulated]
    found = Rival(_is(name, str), _at_least_one(devices), times, Bytes(_size(size)), *simulated)
    return found


def _input_row(given: InputSpec) -> list[Any]:
    return [given.key, list(given.shape), given.dtype, *([True] if given.requires_grad else [])]


def _input(row: list[Any]) -> InputSpec:
    key, shape, dtype, *requires_grad = row
    sizes = tuple(_size(n) for n in shape)
    gradient = (_is(wanted, bool) for wanted in requires_grad)
    return InputSpec(_is(key, str), sizes, _is(dtype, str), *gradient)


def _parameter_row(parameter: PlannedParameter) -> list[Any]:
    stored = _STORED[parameter.regathered]
    layout = str(parameter.layout)
    return [parameter.name, layout, parameter.bytes, parameter.seconds, stored]


def _parameter(row: list[Any], mesh: Mesh, again: frozenset[str]) -> PlannedParameter:
    name, layout, size, seconds, stored = row
    return PlannedParameter(
        _is(name, str),
        Layout.parse(_is(layout, str), mesh),
        Bytes(_size(size)),
        Seconds(_number(seconds)),
        _STORED.index(stored) == 1 or name in again,
    )


def _op_row(op: PlannedOp) -> list[Any]:
    decided = [" ".join(op.tiling), ", ".join(op.splits), str(op.layout)]
    costs = [op.seconds, op.saved_bytes, op.segment]
    source = [op.source.module, op.source.file, op.source.line]
    again = [op.kept, op.freed_bytes] if op.freed_bytes else [op.kept] if op.kept else []
    return [op.name, op.target, *decided, *costs, *source, op.backward_seconds, *again]


def _op(row: list[Any], read: list[str], mesh: Mesh) -> PlannedOp:
    name, target, tiling, splits, layout, seconds, saved, segment, *source = row
    module, file, line, *backward = source
    return PlannedOp(
        _is(name, str),
        _is(target, str),
        Source(_is(module, str), _is(file, str), _is(line, int)),
        _per_axis(_is(tiling, str).split(), mesh),
        _per_axis(_is(splits, str).split(", "), mesh),
        Layout.parse(_is(layout, str), mesh),
        Seconds(_number(seconds)),
        Bytes(_size(saved)),
        _size(segment),
        Seconds(_number(backward[0] if backward else 0.0)),
        _reads(name, read),
        kept=len(backward) > 1 and _is(backward[1], bool),
        freed_bytes=Bytes(_size(backward[2]) if len(backward) > 2 else 0),
    )


def _transfer_row(transfer: PlannedTransfer) -> list[Any]:
    ends = [transfer.value, transfer.consumer, transfer.phase.value]
    times = [transfer.times] if transfer.times > 1 else []
    return [*ends, ", ".join(transfer.collectives), transfer.bytes, transfer.seconds, *times]


def _transfer(row: list[Any]) -> PlannedTransfer:
    value, consumer, phase, names, size, seconds, *times = row
    return PlannedTransfer(
        _is(value, str),
        _is(consumer, str),
        Phase(phase),
        tuple(map(_step, _is(names, str).split(", "))),
        Bytes(_size(size)),
        Seconds(_number(seconds)),
        _size(_at_least_one(times[0] if times else 1)),
    )


def _step(text: str) -> str:
    """A kind of communication and its axis; raises `ValueError` for one that is not known."""
    communication_named(text.partition(" ")[0])
    return text


def _reads(name: str, row: list[Any]) -> tuple[str, ...]:
    """The values that the operator reads, from the row that should be its own."""
    if row[:1] != [name]:
        raise ValueError(f"reads of {row[:1]} where those of {name!r} are needed")
    return tuple(_is(value, str) for value in row[1:])


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
