"""A plan as text: who is sharded how, in the user's module names, and what it costs.

Modules form a tree whose rows include their submodules; neighbours of a
`ModuleList` that read the same are folded into one row.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePath

from shardwright.ir import remarks
from shardwright.ir.layout import Layout
from shardwright.ir.plan import Phase, Plan, PlannedOp, PlannedParameter, Transfer

WIDTH = 100
_NAME = 26
_NUMBER = 9
_SMALL_SHARE = 0.1  # of a module's time; operators below it are not named
_FREE = ("slice", "mask", "embed")  # steps of a redistribution that move no data
_HEADINGS = (("state", "MiB"), ("compute", "ms"), ("saved", "MiB"), ("comm", "ms"))


@dataclass
class _Module:
    """What belongs to one module itself, and its submodules in order of first use."""

    parameters: list[PlannedParameter] = field(default_factory=list)
    ops: list[PlannedOp] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    def at(self, path: str) -> _Module:
        found = self
        for name in path.split(".") if path else ():
            found = found.children.setdefault(name, _Module())
        return found

    def inclusive(self) -> Iterator[_Module]:
        yield self
        for child in self.children.values():
            yield from child.inclusive()


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the tree; `numbers` are in the units of the heading, empty on a detail."""

    depth: int
    name: str
    numbers: tuple[float, ...]
    text: str


def explain(plan: Plan) -> str:
    """The whole plan in text of `WIDTH` columns: totals, then one row per module."""
    titles, units = zip(*_HEADINGS, strict=True)
    lines = [
        *_head(plan),
        "",
        f"{'module':<{_NAME}}{_columns(titles)}  splits; parameters",
        f"{'':<{_NAME}}{_columns(units)}",
    ]
    for row in _Tree(plan).rows():
        lines += _lines(row)
    legend = (
        "Rows include their submodules, a row of n modules shows one of them. State is weights,"
        " gradients and optimizer state; all numbers are of one rank. An axis that is not named"
        " computes all of it, or holds a copy (R)."
    )
    return "\n".join([*lines, "", *textwrap.wrap(legend, WIDTH)])


def _columns(texts: Iterable[str]) -> str:
    return "".join(f"{text:>{_NUMBER}}" for text in texts)


def _head(plan: Plan) -> list[str]:
    compute = sum(op.seconds for op in plan.ops)
    moved = sum(t.seconds for t in plan.transfers)
    update = sum(p.seconds for p in plan.parameters)
    state = sum(p.bytes for p in plan.parameters)
    saved = sum(op.saved_bytes for op in plan.ops)
    lines = [
        f"{plan.name}: mesh {plan.mesh} on {plan.machine}, optimizer {plan.optimizer}",
        _item("step time", f"{_ms(plan.step_seconds)} ms"),
        _item("", f"= compute {_ms(compute)} + communication {_ms(moved)} + update {_ms(update)}"),
        _item("optimum", _gap(plan)),
        _item("inputs", ", ".join(f"{i.key} {i.dtype}{list(i.shape)}" for i in plan.inputs)),
        _item("peak memory", f"{_size(plan.peak_bytes)} per rank"),
        _item(
            "",
            f"= state {_size(state)} + saved for backward {_size(saved)} + temporary"
            f" {_size(max(0, plan.peak_bytes - state - saved))}",
        ),
    ]
    rest = plan.step_seconds - compute - moved - update
    if abs(rest) > 0.01 * plan.step_seconds:
        lines[2] += f" + waiting {_ms(rest)}" if rest > 0 else f" - overlapped {_ms(-rest)}"
    if plan.stages > 1:
        lines.append(_item("pipeline", f"{plan.stages} stages, schedule {plan.schedule}"))
    if plan.micro_batches > 1:
        often = f"{plan.micro_batches}, one after the other; their gradients add up"
        lines.append(_item("micro-batches", often))
    for start, (count, seconds) in _collectives(plan).items():
        lines.append(_item("collectives", f"{count} x {start}, {_ms(seconds)} ms"))
    if pieces := {op.piece for op in plan.ops} - {0}:
        again = sum(op.piece > 0 for op in plan.ops)
        lines.append(_item("recomputed", f"{again} operators in {len(pieces)} pieces"))
    for name, text in plan.habits.lines():
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=_item(name, ""), subsequent_indent=_item("", "")
        )
    lines += remarks.lines(plan, WIDTH)
    for note in plan.notes:
        lines += [
            _item("note" if i == 0 else "", line)
            for i, line in enumerate(textwrap.wrap(note, WIDTH - 16))
        ]
    return lines


def _item(label: str, text: str) -> str:
    return f"  {label:<14}{text}"


def _gap(plan: Plan) -> str:
    bound = plan.lower_bound_seconds
    if bound <= 0:
        return "no lower bound is known"
    percent = 100 * max(0.0, plan.step_seconds / bound - 1)
    if percent < 0.005:
        return "this is the optimum of this cost model for this memory"
    return (
        f"within {percent:.2f} % of the optimum of this cost model for this memory"
        f" ({_ms(bound)} ms)"
    )


def _collectives(plan: Plan) -> dict[str, tuple[int, float]]:
    """Per collective and axis, how many a step runs and the time of the transfers they end."""
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for transfer in plan.transfers:
        moving = [c for c in transfer.collectives if _moves_data(c)]
        for collective in moving:
            counts[collective] += transfer.times
            seconds[collective] += transfer.seconds / len(moving)
    return {c: (counts[c], seconds[c]) for c in sorted(counts, key=lambda c: -seconds[c])}


def _moves_data(collective: str) -> bool:
    return collective.partition(" ")[0] not in _FREE


class _Tree:
    """The modules of a plan, and the rows that describe them."""

    def __init__(self, plan: Plan) -> None:
        self.root = _Module()
        self.ops = {op.name: op for op in plan.ops}
        self.parameters = {p.name for p in plan.parameters}
        for op in plan.ops:
            self.root.at(op.source.module).ops.append(op)
        for parameter in plan.parameters:
            owner = self.root.at(parameter.name.rpartition(".")[0])
            owner.parameters.append(parameter)
        for transfer in plan.transfers:
            reader = self.ops.get(transfer.consumer) or self.ops.get(transfer.value)
            self.root.at(reader.source.module if reader else "").transfers.append(transfer)

    def rows(self) -> list[_Row]:
        return list(self._module(self.root, "(model)", "", 0))

    def _module(self, module: _Module, name: str, path: str, depth: int) -> Iterator[_Row]:
        own = module.ops or module.parameters or module.transfers
        if not own and len(module.children) == 1:
            ((child, only),) = module.children.items()
            joined = child if name == "(model)" else f"{name}.{child}"
            yield from self._module(only, joined, _join(path, child), depth)
            return
        yield _Row(depth, name, _numbers(module), "; ".join(_splits(module)))
        yield from self._transfers(module.transfers, path, depth)
        yield from self._children(module, path, depth + 1)

    def _children(self, module: _Module, path: str, depth: int) -> Iterator[_Row]:
        """Rows of the submodules; a run of numbered ones with equal rows is folded."""
        blocks = []
        for name, child in module.children.items():
            if _is_list(child):
                prefix = f"{name}."
                for number, item in child.children.items():
                    inner = _join(path, prefix + number)
                    blocks.append((prefix, number, list(self._module(item, "", inner, depth))))
            else:
                prefix, number = ("", name) if name.isdigit() else (name, "")
                inner = _join(path, name)
                blocks.append((prefix, number, list(self._module(child, "", inner, depth))))
        runs = groupby(blocks, key=lambda block: (block[0], block[1] != "", block[2]))
        for (prefix, numbered, rows), found in runs:
            numbers = [number for _, number, _ in found]
            name = prefix + (_range(numbers) if numbered else "")
            first, *rest = rows
            yield _Row(first.depth, name + first.name, first.numbers, first.text)
            yield from rest

    def _transfers(self, transfers: Iterable[Transfer], path: str, depth: int) -> Iterator[_Row]:
        """One row per direction, collectives and source line, naming all that they move."""
        grouped: dict[tuple[Phase, tuple[str, ...], int, str], list[Transfer]] = {}
        for t in transfers:
            moving = tuple(c for c in t.collectives if _moves_data(c))
            if moving:
                key = (t.phase, moving, t.times, self._where(t))
                grouped.setdefault(key, []).append(t)
        for (phase, moving, times, where), found in grouped.items():
            what = " ".join(dict.fromkeys(self._moved(t, path) for t in found))
            what = {Phase.BACKWARD: "gradient of ", Phase.AGAIN: "again "}.get(phase, "") + what
            seconds, size = sum(t.seconds for t in found), sum(t.bytes for t in found)
            often = f"{times} x " if times > 1 else ""
            yield _Row(
                depth,
                "",
                (),
                f"{often}{' + '.join(moving)}: {what}, {_mib(size)}, {_ms(seconds)} ms, {where}",
            )

    def _moved(self, transfer: Transfer, path: str) -> str:
        """The value that is moved, as the user knows it; the same text in every repeat."""
        if transfer.value in self.parameters:
            return transfer.value.removeprefix(f"{path}.")
        op = self.ops.get(transfer.value.partition(".")[0]) or self.ops.get(transfer.value)
        return _kind(op) if op else transfer.value

    def _where(self, transfer: Transfer) -> str:
        reader = self.ops.get(transfer.consumer)
        if reader is None or not reader.source.file:
            return f"for {_kind(reader) if reader else transfer.consumer}"
        return f"{_kind(reader)} at {PurePath(reader.source.file).name}:{reader.source.line}"


def _numbers(module: _Module) -> tuple[float, ...]:
    every = list(module.inclusive())
    state = sum(p.bytes for m in every for p in m.parameters)
    compute = sum(op.seconds for m in every for op in m.ops)
    saved = sum(op.saved_bytes for m in every for op in m.ops)
    moved = sum(t.seconds for m in every for t in m.transfers)
    return state / 2**20, compute * 1e3, saved / 2**20, moved * 1e3


def _splits(module: _Module) -> Iterator[str]:
    """What the module's big operators split, then how its parameters lie."""
    total = sum(op.seconds for op in module.ops)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in module.ops:
        seconds[_kind(op), _tiling(op)] += op.seconds
    named: dict[str, list[str]] = {}
    for (kind, tiling), spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent >= _SMALL_SHARE * total:
            named.setdefault(tiling, []).append(kind)
    for tiling, kinds in named.items():
        yield f"{' '.join(kinds)} {tiling}"
    if module.ops and all(op.piece for op in module.ops):
        yield "recomputed"
    layouts: dict[str, list[str]] = {}
    for p in module.parameters:
        lies = _without(p.layout.placements, "R", p.layout) + " regathered" * p.regathered
        layouts.setdefault(lies, []).append(p.name.rpartition(".")[2])
    for layout, names in layouts.items():
        yield f"{' '.join(names)} {layout}"


def _tiling(op: PlannedOp) -> str:
    return _without(op.splits, "-", op.layout, nothing="whole")


def _without(per_axis: Iterable[object], plain: str, layout: Layout, nothing: str = "R") -> str:
    """`axis:choice` of the axes whose choice is not the plain one."""
    named = zip(layout.mesh.names, map(str, per_axis), strict=True)
    return " ".join(f"{axis}:{text}" for axis, text in named if text != plain) or nothing


def _kind(op: PlannedOp) -> str:
    return op.target.split(".")[1] if "." in op.target else op.target


def _is_list(module: _Module) -> bool:
    own = module.ops or module.parameters or module.transfers
    return not own and bool(module.children) and all(name.isdigit() for name in module.children)


def _range(numbers: list[str]) -> str:
    if len(numbers) == 1:
        return numbers[0]
    consecutive = int(numbers[-1]) - int(numbers[0]) + 1 == len(numbers)
    return f"{numbers[0]}-{numbers[-1]}" if consecutive else ",".join(numbers)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _lines(row: _Row) -> list[str]:
    """A row in `WIDTH` columns; what does not fit goes on below itself."""
    indent = "  " * row.depth
    if not row.numbers:
        start = indent + "    "
        return textwrap.wrap(row.text, WIDTH, initial_indent=start, subsequent_indent=start + "  ")
    numbers = _columns(f"{n:.2f}" for n in row.numbers)
    name = indent + row.name
    left = f"{name:<{_NAME}}{numbers}  "
    if len(name) >= _NAME:
        left = f"{name}\n{'':<{_NAME}}{numbers}  "
    blank = " " * (_NAME + len(numbers) + 2)
    text = textwrap.wrap(row.text, WIDTH - len(blank), break_long_words=False) or [""]
    return [(left + text[0]).rstrip(), *(blank + line for line in text[1:])]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 0.005 * 2**20 else "<0.01 MiB"


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
