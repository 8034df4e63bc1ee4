"""Draws a plan on a terminal as a tree coloured by mesh axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import cycle

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardwright.ir.plan import Plan
from shardwright.report.text.axis_table import axis_lines
from shardwright.report.text.explain import HEADINGS, LEGEND, Described, head, tree
from shardwright.report.text.module_rows import ModuleRow
from shardwright.report.text.wrapping import hanging

_NAME, _NUMBER = (26, 54), 10  # columns of a module's name, at least and at most, and of a number
AXIS_STYLES = ("cyan", "magenta", "yellow", "green", "blue")


class PlanTree:
    """The content of `Plan.explain`, in the width of the terminal.

    Splits and transfers of a module are below its numbers, which have names instead of columns on a
    terminal that is too narrow for these.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._axes = plan, plan.mesh.names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what is drawn, as rich asks for it."""
        width, plan = options.max_width, self._plan
        first, *totals = head(plan, width)
        yield Text(first, "bold")
        for line in (*totals, *(part for one in axis_lines(plan) for part in hanging(one, width))):
            yield axes_coloured(line, self._axes)
        yield from self._lines(console, width)
        yield Text(LEGEND, "dim")

    def _lines(self, console: Console, width: int) -> Iterator[Text]:
        """A row of each module, its texts below it, in lines of `width` columns."""
        least, most = _NAME
        left = min(most, width - _NUMBER * len(HEADINGS))
        has_columns = left >= least
        yield Text()
        if has_columns:
            for one in zip(*HEADINGS, strict=True):
                words = "".join(f"{word:>{_NUMBER}}" for word in one)
                yield Text(f"{'module' * (one[0] == HEADINGS[0][0]):<{left}}{words}", "bold")
        for guide, below, node in _guided(tree(self._plan), "", "", ""):
            numbers = node.content.numbers
            name = Text.assemble((guide, "dim"), (node.name, "bold"))
            texts = [(node.content.text, ""), *((text, "dim") for text in node.content.details)]
            if has_columns:
                name.truncate(left, overflow="ellipsis", pad=True)
                name.append("".join(f"{f'{n:.2f}' if n else '-':>{_NUMBER}}" for n in numbers))
            else:
                pairs = zip(HEADINGS, numbers, strict=True)
                named = (f"{title} {n:.2f} {unit}" for (title, unit), n in pairs if n)
                texts.insert(0, (", ".join(named), ""))
            yield name
            start = Text(f"{below}  ", "dim")
            for text, style in texts:
                drawn = axes_coloured(text, self._axes)
                drawn.stylize(style)
                for line in drawn.wrap(console, max(_NUMBER, width - len(start))):
                    yield Text.assemble(start, line)


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
