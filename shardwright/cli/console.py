"""Output of commands: text or one JSON object on stdout, progress on stderr."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from shardwright.ir.frontier import Frontier
from shardwright.ir.plan import Plan
from shardwright.report.frontier.chart import Mark, chart
from shardwright.report.frontier.table import frontier_table, frontier_text, notes, plain_text
from shardwright.report.text.explain import explain
from shardwright.report.text.wrapping import WIDTH, hanging
from shardwright.report.tree import AXIS_STYLES, PlanTree

_LEAST = 40  # columns of paragraphs on the narrowest terminal
_WHOLE_TABLE = 80  # columns of a terminal from which tables of plans have the parts of the step


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    click.echo(json.dumps(content, indent=2))


def columns() -> int:
    """The columns of paragraphs: `WIDTH`, or those of a narrower terminal."""
    terminal = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    return max(_LEAST, min(WIDTH, terminal))


def wrapped(text: str, indent: int = 2) -> str:
    """A paragraph in lines of `columns()`, all but the first indented."""
    return textwrap.fill(text, columns(), subsequent_indent=" " * indent)


def fitted(text: str) -> str:
    """Lines of which, on a terminal, those too long for it are broken below their last column."""
    if not sys.stdout.isatty():
        return text
    width = max(_LEAST, shutil.get_terminal_size((WIDTH, 0)).columns)
    return "\n".join(part for line in text.split("\n") for part in hanging(line, width))


def say(text: str) -> None:
    """Print lines as `fitted`."""
    click.echo(fitted(text))


def print_frontier(frontier: Frontier, chosen: Plan | None = None) -> None:
    """Print the table of plans: drawn on a terminal, aligned text in a pipe."""
    if sys.stdout.isatty():
        console = Console()
        table = frontier_table(frontier, chosen, whole=console.width >= _WHOLE_TABLE)
        console.print(table)
        for note in notes(frontier, plain_text(table), chosen):
            console.print(note, style="dim")
    else:
        click.echo(frontier_text(frontier, chosen))


def print_plan(plan: Plan) -> None:
    """Print the plan: a coloured tree on a terminal, the text of `explain` in a pipe."""
    if sys.stdout.isatty():
        Console().print(PlanTree(plan))
    else:
        click.echo(explain(plan))


def print_chart(marks: Sequence[Mark]) -> None:
    """Print the trade-off as a scatter; on a terminal every symbol has a colour."""
    if not sys.stdout.isatty():
        click.echo(chart(marks))
        return
    console = Console()
    drawn = Text(chart(marks, width=min(console.width, 100)))
    symbols = dict.fromkeys(mark.symbol for mark in marks)
    for place, symbol in enumerate(sorted(symbols, key=str.islower)):
        style = "dim" if symbol.islower() and symbol != "o" else AXIS_STYLES[place % 5]
        drawn.highlight_regex(rf"(?<=[| ]){re.escape(symbol)}(?=[^\w.]|$)", f"bold {style}")
    console.print(drawn)


class TimeLeftColumn(ProgressColumn):
    """The time that is left, by the speed of the fraction that is done; empty where unknown."""

    max_refresh = 0.5  # seconds

    def render(self, task: Task) -> Text:
        """The text beside the bar of a task."""
        left = task.time_remaining
        if left is None or task.finished:
            return Text()
        minutes, seconds = divmod(round(left), 60)
        return Text(f"about {minutes}:{seconds:02} left", style="progress.remaining")


@contextmanager
def working(what: str) -> Iterator[Callable[[str, float], None]]:
    """A context that shows on stderr, on a terminal only, what runs, since when, and what is left.

    Yields a function that takes the present task and the completed fraction.
    """
    console = Console(stderr=True)
    spinner, text, bar = SpinnerColumn(), TextColumn("{task.description}"), BarColumn()
    times = TimeElapsedColumn(), TimeLeftColumn()
    shown = Progress(
        spinner, text, bar, *times, console=console, transient=True, disable=not console.is_terminal
    )
    with shown as progress:
        task = progress.add_task(what, total=None)

        def report(now: str, part: float) -> None:
            progress.update(task, description=f"{what}, {now}", total=1.0, completed=part)

        yield report
