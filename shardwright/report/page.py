"""Renders plans as one self-contained HTML page.

This file converts the plans to data; template, style and script are the files in `web`, the charts
are drawn by plotly.js, which the page contains, compressed.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from shardwright.ir.memory import PARTS, Memory
from shardwright.ir.plan import Plan
from shardwright.report.accuracy import may_fit
from shardwright.report.answer import answer_lines
from shardwright.report.choice import PeakParts, StepParts, fit
from shardwright.report.diff.diff_text import diff_text
from shardwright.report.diff.difference import difference
from shardwright.report.headline import headline, parallelism
from shardwright.report.layer.picture import layer_picture
from shardwright.report.summary import summary
from shardwright.report.text.explain import head, splits
from shardwright.report.text.module_rows import Costs, Module, ModuleRow, fold, module_tree
from shardwright.report.text.module_transfers import ModuleTransfer, TransferReader

if TYPE_CHECKING:
    from markupsafe import Markup

_MOST_COMPARED = 6  # plans: a text for each pair
_CAUSES = {
    "gradients": PARTS["gradients"],
    "saved": PARTS["saved"],
    "gathered": "gathered parameters",
    "communication": "buffers of collectives",
    "workspace": "temporaries",
}
_SAFE = str.maketrans("<&", ",.")


@dataclass(frozen=True, slots=True)
class StepBars:
    """A step as bars: (row, name, kind, start, duration, what it belongs to), in microseconds."""

    label: str
    rows: tuple[str, ...]
    events: tuple[tuple[int, str, str, float, float, str], ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """A plan on the page.

    `label` is its name there, e.g. that of its file; `step` is its predicted timeline.
    """

    label: str
    plan: Plan
    step: StepBars | None = None


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of one of the plans: predicted and measured figures, per step and rank.

    Memory is None where it was not counted.
    """

    label: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int | None = None
    measured_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """The texts of a module in the tree."""

    costs: Costs
    text: str
    moves: tuple[ModuleTransfer, ...]


def page(
    plans: Sequence[Shown],
    title: str,
    memory_limit: int | None = None,
    measured: Sequence[MeasuredRun] = (),
    timeline: StepBars | None = None,
    chosen: int = 0,
) -> str:
    """The whole page as text.

    `plans` are its points; the plan at index `chosen` is shown first. Plans of the search that are
    only known from a plan file are hollow points, faint where nothing simulated them. `timeline` is
    a measured step, or one simulated elsewhere, shown below the chosen plan's own. `memory_limit`,
    in bytes per rank, is drawn as a line. Raises `ImportError` if the template engine or the
    library is not installed.
    """
    if not plans:
        raise ValueError("a report needs at least one plan")
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    costs = _costs([shown.plan for shown in plans])
    data: dict[str, Any] = {
        "plans": [_plan(shown, memory_limit, costs[_search(shown.plan)]) for shown in plans],
        "differences": _differences(plans),
        "rivals": _rivals([shown.plan for shown in plans]),
        "memory_limit": memory_limit,
        "measured": [astuple(run) for run in measured],
        "timeline": _bars(timeline),
        "chosen": chosen,
    }
    web = files("shardwright.report") / "web"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((web / "page.html.j2").read_text())
    return template.render(
        title=title,
        data=Markup(packed(embedded(data))),
        style=Markup((web / "page.css").read_text()),
        script=script("page.js"),
        library=Markup(packed(get_plotlyjs())),
        measured=bool(measured),
        timeline=timeline is not None or any(shown.step for shown in plans),
        curve=any(plan["curve"] for plan in data["plans"]),
    )


def packed(text: str) -> str:
    """Text for a script element, compressed, in base 85; `unpacked` in `common.js` reads it.

    It has no character that HTML gives a meaning to: "," and "." stand for "<" and "&".
    """
    found = base64.b85encode(gzip.compress(text.encode(), mtime=0))
    return found.decode().translate(_SAFE)


def script(file: str) -> Markup:
    """The script of a page, after the functions that all pages share."""
    from markupsafe import Markup

    web = files("shardwright.report") / "web"
    return Markup((web / "common.js").read_text() + (web / file).read_text())


def embedded(data: Mapping[str, Any]) -> str:
    r"""JSON that is safe inside of a script element: it closes none and opens no comment.

    >>> embedded({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plan(
    shown: Shown, memory_limit: int | None, costs: Sequence[tuple[float, int]]
) -> dict[str, Any]:
    """The data of one plan; `costs` are seconds and bytes of plans of the same search."""
    plan = shown.plan
    tree = _tree(plan)
    return {
        "label": shown.label,
        "name": plan.name,
        "verdict": fit(plan, memory_limit),
        "may_fit": may_fit(plan, memory_limit),
        "answer": [*answer_lines(plan, costs, memory_limit), *_precision(plan)],
        "headline": headline(plan),
        "parallelism": parallelism(plan),
        "summary": summary(plan),
        "devices": plan.devices,
        "mesh": str(plan.mesh),
        "axes": list(plan.mesh.names),
        "machine": plan.machine,
        "inputs": ", ".join(f"{one.key} {one.dtype}{list(one.shape)}" for one in plan.inputs),
        "micro_batches": plan.micro_batches,
        "seconds": plan.step_seconds,
        "bytes": plan.peak_bytes,
        "bound": plan.lower_bound_seconds,
        "parts": StepParts.of(plan)._asdict(),
        "held": PeakParts.of(plan)._asdict(),
        "head": head(plan),
        "tree": _node(tree),
        "layer": asdict(picture) if (picture := layer_picture(plan, tree)) else None,
        "step": _bars(shown.step),
        "curve": _curve(plan.memory),
    }


def _precision(plan: Plan) -> Iterator[tuple[str, str]]:
    """The line on the precision, and on who chose it if the plan says that."""
    if plan.chosen_precision:
        yield "precision", plan.chosen_precision
    elif plan.numerics.precision == "tf32":
        yield "precision", "float32 with products in TF32"
    elif plan.numerics.is_mixed:
        yield "precision", f"{plan.numerics.precision} mixed precision"


def _curve(memory: Memory | None) -> dict[str, Any] | None:
    """Memory over the step by cause, lowest first; None where it was not recorded.

    A cause is a name and bytes at each moment, or one number if it does not change.
    """
    if memory is None or not memory.curve:
        return None
    causes = {name: [getattr(one, name) for one in memory.curve] for name in _CAUSES}
    return {
        "what": [one.what for one in memory.curve],
        "at": memory.at,
        "causes": [
            ("parameters", memory.parameters),
            (PARTS["optimizer_state"], memory.optimizer_state),
            (PARTS["batch"], memory.batch + memory.rounding),
            *((_CAUSES[name], sizes) for name, sizes in causes.items()),
        ],
    }


def _bars(timeline: StepBars | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    return {"label": timeline.label, "rows": timeline.rows, "events": timeline.events}


def _tree(plan: Plan) -> ModuleRow[_Row]:
    moves, parameters = TransferReader(plan), frozenset(p.name for p in plan.parameters)

    def describe(path: str, module: Module) -> _Row:
        text = "; ".join(splits(module, parameters))
        return _Row(module.costs, text, tuple(moves.of(module.transfers, path)))

    return fold(module_tree(plan), describe)


def _node(node: ModuleRow[_Row]) -> dict[str, Any]:
    row = node.content
    return {
        "name": node.name,
        "path": node.path,
        "count": node.count,
        "costs": list(row.costs),
        "text": row.text,
        "moves": [[m.kind, m.where, m.source, m.bytes, m.seconds, m.times] for m in row.moves],
        "children": [_node(child) for child in node.children],
    }


def _search(plan: Plan) -> tuple[str, str, int]:
    """The model, the machine and the number of devices: plans that share them are alternatives."""
    return plan.fingerprint, plan.machine, plan.devices


def _costs(plans: Sequence[Plan]) -> dict[tuple[str, str, int], list[tuple[float, int]]]:
    """Seconds and bytes of simulated plans, fastest first, by what `_search` tells apart."""
    found: defaultdict[tuple[str, str, int], set[tuple[float, int]]] = defaultdict(set)
    for plan in plans:
        found[_search(plan)].add((plan.step_seconds, plan.peak_bytes))
        for rival in plan.rivals:
            if rival.is_simulated:
                known = *_search(plan)[:2], rival.devices
                found[known].add((rival.step_seconds, rival.peak_bytes))
    return {search: sorted(costs) for search, costs in found.items()}


def _differences(plans: Sequence[Shown]) -> list[list[str]]:
    """The text of `diff` from each plan to each other; empty where there are too many."""
    if not 1 < len(plans) <= _MOST_COMPARED:
        return []
    return [
        [
            diff_text(difference(one.plan, other.plan), (one.label, other.label))
            if one is not other
            else ""
            for other in plans
        ]
        for one in plans
    ]


def _rivals(plans: Sequence[Plan]) -> list[list[Any]]:
    """Points of the plans' frontiers that are not among the plans."""
    own = {(p.devices, p.step_seconds, p.peak_bytes) for p in plans}
    found = {(r.devices, r.step_seconds, r.peak_bytes): r for plan in plans for r in plan.rivals}
    return [[r.name, *key, r.is_simulated] for key, r in found.items() if key not in own]
