"""A table of the mesh axes of a plan: role, size, link, what they split, and bytes sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from shardwright.ir.pipeline import AXIS as PIPELINE
from shardwright.ir.plan import Plan
from shardwright.machine.model import MachineError
from shardwright.machine.presets import preset
from shardwright.machine.topology import crossed_levels
from shardwright.planner.axes.plan_roles import IDLE, MIXED, axis_uses
from shardwright.report.summary import split_along
from shardwright.report.text.module_rows import moves_data
from shardwright.report.units import size as size_text

_ROLES = {
    "dp_replicate": "data (replicas)",
    "dp_shard": "data (sharded parameters)",
    "cp": "context",
    "tp": "tensor",
    "ep": "experts",
    MIXED: "mixed",
    IDLE: "repeated",
}
_HEADINGS = ("axis", "role", "size", "link", "sent a step", "splits")


@dataclass(frozen=True, slots=True)
class AxisRow:
    """One mesh axis of a plan.

    Attributes:
        axis: its name.
        role: what it does.
        size: devices along it.
        link: the outermost level of links that it crosses; "" on a machine that is no preset.
        splits: the dimensions that operators split along it.
        bytes: of the largest tiles of all messages along it in a step.
    """

    axis: str
    role: str
    size: int
    link: str
    splits: str
    bytes: int

    def as_json(self) -> dict[str, object]:
        """The row as JSON content."""
        return asdict(self)


def axis_rows(plan: Plan) -> list[AxisRow]:
    """The rows of axes of more than one device, outermost first."""
    sent = Counter[str]()
    for transfer in plan.transfers:
        for collective in filter(moves_data, transfer.collectives):
            sent[collective.partition(" ")[2]] += transfer.bytes * transfer.times
    uses = dict(zip(plan.layout_mesh.names, axis_uses(plan), strict=True))
    links, rows = _links(plan), []
    for name, size in plan.mesh.axes:
        if size == 1:
            continue
        if plan.pipeline is not None and name == PIPELINE:
            rows.append(AxisRow(name, "pipeline", size, links.get(name, ""), "layers", 0))
            continue
        splits = split_along(plan, plan.layout_mesh.names.index(name))
        role = _ROLES[uses[name].role]
        rows.append(AxisRow(name, role, size, links.get(name, ""), splits, sent[name]))
    return rows


def axis_lines(plan: Plan) -> Iterator[str]:
    """The table as lines; none on one device."""
    found = axis_rows(plan)
    if not found:
        return
    cells = [
        (one.axis, one.role, str(one.size), one.link or "?", _sent(one), one.splits)
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *cells, strict=True)]
    for row in (_HEADINGS, *cells):
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(padded)}".rstrip()


def _sent(row: AxisRow) -> str:
    return "activations" if row.role == "pipeline" else size_text(row.bytes)


def _links(plan: Plan) -> dict[str, str]:
    """By axis the outermost level of links that it crosses, where the machine is a preset."""
    try:
        machine = preset(plan.machine)
    except MachineError:
        return {}
    if machine.devices < plan.mesh.size:
        return {}
    crossed = zip(plan.mesh.names, crossed_levels(machine, plan.mesh), strict=True)
    return {name: machine.levels[max(levels)].name for name, levels in crossed if levels}
