"""Renders the frontier as a table, fastest first, with the baselines.

On a terminal it is drawn by rich; in a pipe it is aligned plain text.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from string import ascii_lowercase

from rich import box
from rich.console import Console
from rich.table import Table

from shardwright.ir.frontier import Frontier
from shardwright.ir.plan import Plan
from shardwright.report.choice import StepParts
from shardwright.report.summary import LEGEND, summary
from shardwright.report.units import milliseconds, size

PLAIN_WIDTH = 100
_SHOWN = 12  # the most listed plans of a long frontier
SETTLED = (
    "plans marked ~ and <= are not settled: they may take longer, and need no more than listed"
)
_ABOUT, _AT_MOST = "~ ", "<= "
_PARTS = ("compute", "comm")  # of the step
_HEADINGS = ("", "step", "memory/rank", *_PARTS, "strategy")


def frontier_table(
    frontier: Frontier, chosen: Plan | None = None, *, plain: bool = False, whole: bool = True
) -> Table:
    """One row per plan: frontier by index, then baselines by letter; `*` marks the chosen one.

    The chosen plan may be one outside of the frontier, which has no index. The parts of the step
    are left out unless `whole`.
    """
    loose = not frontier.is_settled
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    headings = [heading for heading in _HEADINGS if whole or heading not in _PARTS]
    for heading in headings:
        numeric = heading in ("step", "memory/rank", "compute", "comm")
        wraps = heading == "strategy"
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=not wraps)
    bold = None if plain else "bold"
    listed = _listed(frontier, chosen)
    place = None if chosen is None else frontier.place_of(chosen)
    off = chosen is not None and place is None
    for index in listed:
        picked = index == place
        if chosen is not None and off and chosen.step_seconds < frontier.costs[index][0]:
            table.add_row(*_row("*", chosen, summary(chosen), whole=whole), style=bold)
            off = False
        plan = chosen if chosen is not None and picked else frontier[index]
        style = bold if picked else None
        mark = f"{index}{'*' * picked}"
        table.add_row(*_row(mark, plan, summary(plan), loose=loose, whole=whole), style=style)
    if chosen is not None and off:
        table.add_row(*_row("*", chosen, summary(chosen), whole=whole), style=bold)
    hidden = len(frontier) - len(listed)
    if hidden:
        table.add_row("…", *[""] * (len(headings) - 2), f"{hidden} more")
    table.add_section()
    for letter, plan in zip(ascii_lowercase, frontier.baselines, strict=False):
        style = None if plain else "dim"
        table.add_row(
            *_row(letter, plan, _known(plan, frontier), loose=loose, whole=whole), style=style
        )
    return table


def frontier_text(frontier: Frontier, chosen: Plan | None = None) -> str:
    """The table of `frontier_table` as aligned plain text, with its notes."""
    text = plain_text(frontier_table(frontier, chosen, plain=True))
    return "\n".join([text, *notes(frontier, text, chosen)])


def notes(frontier: Frontier, text: str, chosen: Plan | None = None) -> list[str]:
    """The legend of shares, if the table has some, and why the chosen plan needs less than others.

    `text` is the table's text.
    """
    found = [LEGEND] if "%)" in text else []
    return [*found, SETTLED] if _AT_MOST in text else found


def plain_text(table: Table, width: int = PLAIN_WIDTH) -> str:
    """A rich table as text without colours or trailing blanks."""
    page = io.StringIO()
    Console(file=page, width=width, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def _row(
    mark: str, plan: Plan, strategy: str, *, loose: bool = False, whole: bool = True
) -> Iterator[str]:
    """Cells of a row; time and memory that were not simulated are marked."""
    parts = StepParts.of(plan)
    settled = plan.memory is not None or not loose
    yield mark
    yield _ABOUT * (not settled) + milliseconds(plan.step_seconds)
    yield _AT_MOST * (not settled) + size(plan.peak_bytes)
    if whole:
        yield milliseconds(parts.compute)
        yield milliseconds(parts.communication)
    yield strategy


def _known(plan: Plan, frontier: Frontier) -> str:
    """A baseline's name, with the constraints that rule it out."""
    where = f" ({plan.mesh})" if plan.mesh.size > 1 else ""
    broken = "; ".join(frontier.broken.get(plan.name, ()))
    return f"{plan.name}{where}{f', breaks {broken}' if broken else ''}"


def _listed(frontier: Frontier, chosen: Plan | None) -> list[int]:
    """Indices of the rows: all of a short frontier, else evenly spaced ones, ends and chosen."""
    last = len(frontier) - 1
    if last < _SHOWN:
        return list(range(last + 1))
    kept = {round(i * last / (_SHOWN - 1)) for i in range(_SHOWN)}
    place = None if chosen is None else frontier.place_of(chosen)
    return sorted(kept if place is None else {*kept, place})
