"""Explains a plan as text: the sharding and cost of every module, in the user's names.

Modules form a tree whose rows include their submodules; neighbours of a
`ModuleList` with equal texts are folded into one row.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwright.ir.memory import PARTS, Memory
from shardwright.ir.plan import Plan
from shardwright.report.headline import headline
from shardwright.report.text import notes
from shardwright.report.text.axis_table import axis_lines
from shardwright.report.text.module_rows import (
    Module,
    ModuleRow,
    fold,
    kept,
    kept_words,
    module_tree,
    moves_data,
    part_name,
    recomputed,
    shares,
    stored,
    tiling_words,
)
from shardwright.report.text.module_transfers import TransferReader
from shardwright.report.text.wrapping import WIDTH, hanging

_NAME = 26
_NUMBER = 9
_MODULES = 4  # of which offloaded segments are named
SMALL_SHARE = 0.1  # fraction of a module's time; operators below it are not named
LEGEND = (
    "Rows include their submodules, a row of n modules shows one of them. Memory is what one rank"
    " holds at the peak, and that of the first row is all of it: state is weights, gradients and"
    " optimizer state, saved what the backward pass needs, other the rest. What belongs to no"
    " module has rows in parentheses. An axis that is not named computes all of it, or holds a copy"
    " (R)."
)
HEADINGS = (
    ("state", "MiB"),
    ("saved", "MiB"),
    ("other", "MiB"),
    ("compute", "ms"),
    ("comm", "ms"),
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the tree; `numbers` are in the units of the heading, empty on a detail."""

    depth: int
    name: str
    numbers: tuple[float, ...]
    text: str


def explain(plan: Plan) -> str:
    """The whole plan in text of `WIDTH` columns: totals, then one row per module."""
    titles, units = zip(*HEADINGS, strict=True)
    axes = list(axis_lines(plan))
    lines = [
        *head(plan),
        *(["", *axes] if axes else []),
        "",
        f"{'module':<{_NAME}}{_columns(titles)}  splits; parameters",
        f"{'':<{_NAME}}{_columns(units)}",
    ]
    for row in _rows(plan):
        lines += _lines(row)
    return "\n".join([*lines, "", *textwrap.wrap(LEGEND, WIDTH)])


def _columns(texts: Iterable[str]) -> str:
    return "".join(f"{text:>{_NUMBER}}" for text in texts)


def _utilisation(plan: Plan) -> str:
    return "" if plan.utilisation is None else f", MFU {plan.utilisation:.1%}"


def head(plan: Plan, width: int = WIDTH) -> list[str]:
    """Totals of the plan and general remarks, an item each, in lines of `width` columns."""
    compute = sum(op.seconds for op in plan.ops)
    moved = sum(t.seconds for t in plan.transfers)
    update = sum(p.seconds for p in plan.parameters)
    lines = [
        f"{plan.name}: mesh {plan.mesh} on {plan.machine}, optimizer {plan.optimizer}",
        _item("parallelism", headline(plan)),
        _item("step time", f"{_ms(plan.step_seconds)} ms{_utilisation(plan)}"),
        _item("", f"= compute {_ms(compute)} + communication {_ms(moved)} + update {_ms(update)}"),
        _item("optimum", gap(plan)),
        _item("inputs", ", ".join(f"{i.key} {i.dtype}{list(i.shape)}" for i in plan.inputs)),
        _item("peak memory", f"{_size(plan.peak_bytes)} per rank"),
    ]
    if plan.memory is not None:
        lines += _memory(plan.memory)
    else:
        parts: Counter[str] = Counter()
        for share in shares(plan):
            parts[part_name(share.part)] += share.bytes
        lines += _sum_of(parts)
        lines.append(_item("", "by tables that add up; of a settled plan all of it is attributed"))
    rest = plan.step_seconds - compute - moved - update
    if plan.pipeline is not None:
        lines[3] += " of all stages, at the same time"
    elif abs(rest) > 0.01 * plan.step_seconds:
        lines[3] += f" + waiting {_ms(rest)}" if rest > 0 else f" - overlapped {_ms(-rest)}"
    lines += _stages(plan)
    if plan.micro_batches > 1:
        often = f"{plan.micro_batches}, one after the other; their gradients add up"
        lines.append(_item("micro-batches", often))
    if plan.ahead > 1:
        lines.append(_item("prefetch", f"parameters are gathered {plan.ahead} buckets ahead"))
    for start, (count, seconds) in _collectives(plan).items():
        lines.append(_item("collectives", f"{count} x {start}, {_ms(seconds)} ms"))
    if segments := {op.segment for op in plan.ops} - {0}:
        again = sum(op.runs_again for op in plan.ops)
        once = ", ".join(f"{count} {word}" for word, count in kept_words(plan.ops).items())
        keeping = f", which keep the results of {once}" if once else ""
        text = f"{again} operators in {len(segments)} segments{keeping}"
        lines.append(_item("recomputed", text))
        if trade := recomputed(plan.ops, plan.transfers, _names(plan)):
            lines.append(_item("", trade.without()))
        if once:
            lines.append(_item("", f"what is kept: {kept(plan.ops).kept()}"))
    lines += [_item("offloaded", text) for text in _offloaded(plan)]
    if plan.expert_skew:
        often = f"the busiest device is taken to have {plan.expert_skew:g} times the mean of rows"
        lines.append(_item("experts", often))
    if plan.host_devices:
        how = (
            f"tokens go once to each host of {plan.host_devices} devices that has some of their"
            " experts, and from there to these devices"
        )
        lines.append(_item("" if plan.expert_skew else "experts", how))
    precision = [("trained in", plan.chosen_precision)] if plan.chosen_precision else []
    lines += [_item(name, text) for name, text in (*precision, *plan.numerics.lines())]
    lines += notes.lines(plan, width)
    lines += [_item("note", note) for note in plan.notes]
    return [part for line in lines for part in hanging(line, width)]


def _offloaded(plan: Plan) -> Iterator[str]:
    """The kinds of values that wait in the memory of the host, and of which modules."""
    if "activations" in plan.offload:
        modules: dict[int, str] = {}
        for op in plan.ops:
            if op.segment and op.segment not in plan.on_device:
                modules.setdefault(op.segment, op.source.module or "the model")
        names = list(dict.fromkeys(modules.values()))
        more = f" and {len(names) - _MODULES} more" if len(names) > _MODULES else ""
        many = f"{len(modules)} recomputed segment{'s'[: len(modules) != 1]}"
        starts = f", which begin in {', '.join(names[:_MODULES])}{more}" if names else ""
        yield f"inputs of {many}{starts}"
    if "optimizer" in plan.offload:
        yield "the optimizer's state of all parameters"
    if "parameters" in plan.offload:
        yield "all parameters and their gradients, which the host updates"


def _memory(memory: Memory) -> Iterator[str]:
    """The parts of the peak, where it occurs, and memory outside of it."""
    yield from _sum_of({PARTS[name]: size for name, size in memory.parts().items()})
    at = f", at {memory.at}" if memory.at else ", as the tables of the search add up"
    yield _item("", f"on rank {memory.rank}{at}")
    if memory.libraries:
        yield _item("", f"and beside it {_size(memory.libraries)} of workspaces of libraries")
    if memory.context:
        yield _item("", f"and beside it {_size(memory.context)} of the driver and its libraries")
    if memory.host:
        yield _item("", f"offloaded values take {_size(memory.host)} of the memory of the host")
    if memory.reserved:
        yield _item("", f"torch's allocator reserves {_size(memory.reserved)}, with fragments")


def _sum_of(parts: Mapping[str, int]) -> Iterator[str]:
    texts = [f"{name} {_size(size)}" for name, size in parts.items() if size]
    yield _item("", f"= {' + '.join(texts)}")


def _stages(plan: Plan) -> list[str]:
    """For every stage its first operator, its part of the computation, and its group of devices."""
    if plan.pipeline is None:
        return []
    groups = f"{plan.pipeline.groups} groups of {plan.layout_mesh.size} devices"
    lines = [_item("pipeline", f"{plan.stages} stages on {groups}, schedule {plan.schedule}")]
    starts = [op.name for op in plan.ops[:1]] + list(plan.cuts)
    stage, stage_of = -1, {}
    for op in plan.ops:
        stage += op.name in starts
        stage_of[op.name] = stage
    for number, home in enumerate(plan.pipeline.homes):
        ops = [op for op in plan.ops if stage_of[op.name] == number]
        spent = _ms(sum(op.seconds for op in ops))
        where = ops[0].source.module or "the model" if ops else "nothing"
        lines.append(
            _item(
                "",
                f"stage {number} on group {home}: {len(ops)} operators from {where},"
                f" compute {spent} ms",
            )
        )
    return lines


def _item(label: str, text: str) -> str:
    return f"  {label:<14}{text}"


def gap(plan: Plan) -> str:
    """The most that the plan can be from the optimum.

    No search tries every mesh, schedule and number of micro-batches of pipelines.
    """
    bound = plan.lower_bound_seconds
    if bound <= 0:
        return "no lower bound is known"
    percent = 100 * max(0.0, plan.step_seconds / bound - 1)
    tried = " and the pipelines that were tried" if plan.stages > 1 else ""
    if percent < 0.005:
        return f"this is the optimum of this cost model for this memory{tried}"
    return (
        f"within {percent:.2f} % of the optimum of this cost model for this memory{tried}"
        f" ({_ms(bound)} ms)"
    )


def _collectives(plan: Plan) -> dict[str, tuple[int, float]]:
    """Per collective and axis, the count per step and the time of transfers that end with it."""
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for transfer in plan.transfers:
        moving = [c for c in transfer.collectives if moves_data(c)]
        for collective in moving:
            counts[collective] += transfer.times
            seconds[collective] += transfer.seconds / len(moving)
    return {c: (counts[c], seconds[c]) for c in sorted(counts, key=lambda c: -seconds[c])}


@dataclass(frozen=True, slots=True)
class Described:
    """The texts of a module in a row of the tree, in the units of the heading."""

    numbers: tuple[float, ...]
    text: str
    details: tuple[str, ...]


def tree(plan: Plan) -> ModuleRow[Described]:
    """The plan's modules with their texts, repeats folded."""
    moves, parameters = TransferReader(plan), _names(plan)

    def describe(path: str, module: Module) -> Described:
        details = tuple(map(str, moves.of(module.transfers, path)))
        return Described(_numbers(module), "; ".join(splits(module, parameters)), details)

    return fold(module_tree(plan), describe)


def _rows(plan: Plan) -> Iterator[_Row]:
    for depth, node in tree(plan).visit():
        yield _Row(depth, node.name, node.content.numbers, node.content.text)
        for text in node.content.details:
            yield _Row(depth, "", (), text)


def _numbers(module: Module) -> tuple[float, ...]:
    costs = module.costs
    return (
        costs.state_bytes / 2**20,
        costs.saved_bytes / 2**20,
        costs.other_bytes / 2**20,
        costs.compute_seconds * 1e3,
        costs.comm_seconds * 1e3,
    )


def _names(plan: Plan) -> frozenset[str]:
    return frozenset(parameter.name for parameter in plan.parameters)


def splits(module: Module, parameters: Collection[str]) -> Iterator[str]:
    """In words, the split of the module's big operators, then the layouts of its parameters.

    Between them is what is recomputed and kept, with its memory and time, of all operators of the
    module and its submodules. `parameters` are the names of all of the plan.
    """
    total = sum(op.seconds for op in module.ops)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in module.ops:
        seconds[op.kind, tiling_words(op)] += op.seconds
    named: dict[str, list[str]] = {}
    for (name, tiling), spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent >= SMALL_SHARE * total:
            named.setdefault(tiling, []).append(name)
    for tiling, kinds in named.items():
        yield f"{' '.join(kinds)} {tiling}"
    every = list(module.inclusive())
    ops = [op for one in every for op in one.ops]
    if trade := recomputed(ops, (t for one in every for t in one.transfers), parameters):
        yield f"recomputed: {trade.without()}"
    if once := kept_words(ops):
        yield f"kept: {', '.join(once)}: {kept(ops).kept()}"
    layouts: dict[str, list[str]] = {}
    for p in module.parameters:
        layouts.setdefault(stored(p), []).append(p.name.rpartition(".")[2])
    for layout, names in layouts.items():
        yield f"{' '.join(names)} {layout}"


def _lines(row: _Row) -> list[str]:
    """A row in `WIDTH` columns, wrapped."""
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


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
