"""Groups the redistributions of a module for readers.

Transfers of one phase that run the same collectives for the same source line are combined into one
row, which names all their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

from shardwright.ir.plan import Phase, Plan, PlannedTransfer
from shardwright.report.text.module_rows import moves_data
from shardwright.report.units import steps

_OF = {Phase.FORWARD: "", Phase.RECOMPUTE: "again ", Phase.BACKWARD: "gradient of "}


@dataclass(frozen=True, slots=True)
class ModuleTransfer:
    """`collectives` that run `times` a step; `bytes` of the largest tiles, `seconds` of all times.

    `where` is the operator that needs them, with the user's file and line where
    they are known; `source` the whole path of that file.
    """

    collectives: tuple[str, ...]
    times: int
    what: str
    where: str
    source: str
    bytes: int
    seconds: float

    @property
    def kind(self) -> str:
        """The collective, its axis and its reader: `all_reduce tp: linear`."""
        often = f"{self.times} x " if self.times > 1 else ""
        return f"{often}{steps(self.collectives)}: {self.what}"

    def __str__(self) -> str:
        mib = self.bytes / 2**20
        size = f"{mib:.2f} MiB" if mib >= 0.005 else "<0.01 MiB"
        return f"{self.kind}, {size}, {self.seconds * 1e3:.2f} ms, {self.where}"


class TransferReader:
    """Reads the transfers of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._ops = {op.name: op for op in plan.ops}
        self._parameters = {p.name for p in plan.parameters}

    def of(self, transfers: Iterable[PlannedTransfer], path: str) -> Iterator[ModuleTransfer]:
        """The transfers of the module at `path`; equal in every repeat of it."""
        grouped: dict[tuple[Phase, tuple[str, ...], int, str, str], list[PlannedTransfer]] = {}
        for t in transfers:
            moving = tuple(c for c in t.collectives if moves_data(c))
            if moving:
                key = (t.phase, moving, t.times, *self._where(t))
                grouped.setdefault(key, []).append(t)
        for (phase, moving, times, where, source), found in grouped.items():
            what = " ".join(dict.fromkeys(self._moved(t, path) for t in found))
            size, seconds = sum(t.bytes for t in found), sum(t.seconds for t in found)
            yield ModuleTransfer(moving, times, _OF[phase] + what, where, source, size, seconds)

    def _moved(self, transfer: PlannedTransfer, path: str) -> str:
        """The name of the moved value in the user's code."""
        if transfer.value in self._parameters:
            return transfer.value.removeprefix(f"{path}.")
        op = self._ops.get(transfer.value.partition(".")[0]) or self._ops.get(transfer.value)
        return op.kind if op else transfer.value

    def _where(self, transfer: PlannedTransfer) -> tuple[str, str]:
        reader = self._ops.get(transfer.consumer)
        if reader is None or not reader.source.file:
            return f"for {reader.kind if reader else transfer.consumer}", ""
        file, line = reader.source.file, reader.source.line
        return f"{reader.kind} at {PurePath(file).name}:{line}", f"{file}:{line}"
