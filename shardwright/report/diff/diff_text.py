"""Renders a comparison of two plans as a table, a tree of modules and JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.diff.difference import Change, Difference, Total
from shardwright.report.frontier.table import plain_text
from shardwright.report.text.module_rows import ModuleRow
from shardwright.report.text.wrapping import WIDTH
from shardwright.report.tree import axes_coloured
from shardwright.report.units import milliseconds, size

_NAME = 20, 34  # columns of the name of a module, at least and at most
_NUMBER = 12
_HEADINGS = ("state", "saved", "other", "compute", "comm")


def diff_tables(
    found: Difference, names: tuple[str, str], axes: Sequence[str], width: int
) -> RenderableType:
    """The difference for a terminal of `width` columns; `axes` of the meshes are coloured."""
    parts: list[RenderableType] = [_totals(found, names, plain=False)]
    if found.modules is not None:
        lines = _modules(found.modules, width)
        parts += [axes_coloured(line, axes) for line in lines]
    parts.append(Text(_closing(found), "dim"))
    return Group(*parts)


def diff_text(found: Difference, names: tuple[str, str]) -> str:
    """The difference as aligned plain text."""
    lines = [plain_text(_totals(found, names, plain=True))]
    if found.modules is not None:
        lines += ["", *_modules(found.modules, WIDTH)]
    return "\n".join([*lines, "", textwrap.fill(_closing(found), WIDTH)])


def diff_json(found: Difference) -> dict[str, Any]:
    """The difference in seconds and bytes, `modules` in the order of the tree."""
    totals = {
        t.name.replace(" ", "_"): {"first": t.first, "second": t.second} for t in found.totals
    }
    walked = found.modules.visit() if found.modules else ()
    return {
        "same": found.is_empty,
        "settings": {name: {"first": a, "second": b} for name, a, b in found.settings},
        "totals": totals,
        "modules": [
            {
                "module": node.path,
                "count": node.count,
                **node.content.costs._asdict(),
                "changes": list(node.content.texts),
            }
            for _, node in walked
        ],
    }


def _closing(found: Difference) -> str:
    if found.is_empty:
        return "The plans do the same."
    if found.modules is None:
        return "Every module is computed and stored in the same way."
    text = (
        "Differences are second minus first, of one rank, and include submodules; a row of n"
        " modules shows one of them. Modules in which nothing changed are left out."
    )
    if any(name == "mesh" for name, _, _ in found.settings):
        text += " Axes of meshes of one shape have the names of the first plan."
    return text


def _totals(found: Difference, names: tuple[str, str], *, plain: bool) -> Table:
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(Text(name), justify="right")
    table.add_column("difference", justify="right", no_wrap=True)
    for name, first, second in found.settings:
        table.add_row(name, Text(first), Text(second), "")
    for total in found.totals:
        if total.part and total.first == total.second == 0:
            continue
        show: Callable[[float], str] = milliseconds if total.unit == "s" else _bytes
        name = "  " * total.part + total.name
        table.add_row(name, show(total.first), show(total.second), _change(total, show, plain))
    return table


def _bytes(count: float) -> str:
    return size(count) if count else "0"


def _change(total: Total, show: Callable[[float], str], plain: bool) -> Text:
    change = total.second - total.first
    if change == 0:
        return Text("same", "" if plain else "dim")
    share = f" ({100 * change / total.first:+.1f} %)" if total.first > 0 else ""
    text = f"{'+' if change > 0 else '-'}{show(abs(change))}{share}"
    return Text(text, "" if plain else "red" if change > 0 else "green")


def _modules(root: ModuleRow[Change], width: int) -> Iterator[str]:
    """One row per module, with its changes below, in lines of `width` columns.

    Where these are too narrow for a table, numbers have names and are below the module.
    """
    least, most = _NAME
    left = min(most, width - _NUMBER * len(_HEADINGS))
    has_columns = left >= least
    if has_columns:
        yield f"{'module':<{left}}" + "".join(f"{heading:>{_NUMBER}}" for heading in _HEADINGS)
    for depth, node in root.visit():
        costs = node.content.costs
        numbers = (
            _signed(costs.state_bytes, size),
            _signed(costs.saved_bytes, size),
            _signed(costs.other_bytes, size),
            _signed(costs.compute_seconds, milliseconds),
            _signed(costs.comm_seconds, milliseconds),
        )
        name, texts = "  " * depth + node.name, list(node.content.texts)
        if not has_columns:
            pairs = zip(_HEADINGS, numbers, strict=True)
            texts.insert(
                0, ", ".join(f"{word} {number}" for word, number in pairs if number != "-")
            )
        if not has_columns or len(name) >= left:
            yield name
            name = ""
        if has_columns:
            yield f"{name:<{left}}" + "".join(f"{number:>{_NUMBER}}" for number in numbers)
        start = "  " * depth + "    "
        for text in texts:
            yield from textwrap.wrap(
                text, width, initial_indent=start, subsequent_indent=start + "  "
            )


def _signed(value: float, show: Callable[[float], str]) -> str:
    """A difference with its sign; a dash where it rounds to zero."""
    text = show(abs(value))
    if value == 0 or not any(c in "123456789" for c in text):
        return "-"
    return f"{'+' if value > 0 else '-'}{text}"
