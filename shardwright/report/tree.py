"""Draws a plan on a terminal as a tree coloured by mesh axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import cycle

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.ir.plan import Plan
from shardwright.report.text.axis_table import axis_lines
from shardwright.report.text.explain import HEADINGS, LEGEND, Described, head, tree
from shardwright.report.text.module_rows import ModuleRow

AXIS_STYLES = ("cyan", "magenta", "yellow", "green", "blue")


def plan_tree(plan: Plan) -> RenderableType:
    """The content of `Plan.explain`, in the width of the terminal."""
    first, *totals = [*head(plan), *axis_lines(plan)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("module", no_wrap=True)
    for title, unit in HEADINGS:
        table.add_column(f"{title}\n{unit}", justify="right", no_wrap=True)
    table.add_column("splits; parameters", ratio=1, overflow="fold")
    for guide, below, node in _guided(tree(plan), "", "", ""):
        numbers = [f"{n:.2f}" if n else Text("-", "dim") for n in node.content.numbers]
        name = Text.assemble((guide, "dim"), node.name)
        table.add_row(name, *numbers, axes_coloured(node.content.text, plan.mesh.names))
        for text in node.content.details:
            moved = axes_coloured(text, plan.mesh.names)
            moved.stylize("dim")
            table.add_row(Text(below, "dim"), *[""] * len(HEADINGS), moved)
    lines = [axes_coloured(line, plan.mesh.names) for line in totals]
    return Group(Text(first, "bold"), *lines, table, Text(LEGEND, "dim"))


def _guided(
    node: ModuleRow[Described], guide: str, below: str, indent: str
) -> Iterator[tuple[str, str, ModuleRow[Described]]]:
    """Every node with the tree's lines to its left and to the left of its details."""
    yield guide, below + ("│ " if node.children else ""), node
    for child in node.children:
        last = child is node.children[-1]
        deeper = indent + ("  " if last else "│ ")
        yield from _guided(child, indent + ("└ " if last else "├ "), deeper, deeper)


def axes_coloured(text: str, axes: Iterable[str]) -> Text:
    """`text` with `dp:S(0)` and `all_reduce dp` in the colour of the axis."""
    drawn = Text(text)
    for name, style in zip(axes, cycle(AXIS_STYLES), strict=False):
        word = re.escape(name)
        drawn.highlight_regex(rf"(?<![\w.]){word}(:\S+?(?=[;,\s]|$)|(?=[\s:]|$))", style)
    return drawn
