"""Draws the trade-off as a scatter of characters: memory to the right, step time upwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.report.units import milliseconds, size


class Mark(NamedTuple):
    """A point of the chart; of points in one cell the last one is shown."""

    seconds: float
    bytes: int
    symbol: str


def chart(marks: Sequence[Mark], width: int = 72, height: int = 16) -> str:
    """Lines of text with the marks between their smallest and largest costs.

    >>> print(chart([Mark(0.1, 2**20, "o"), Mark(0.05, 2**21, "*")], width=30, height=3))
     100 ms |o
            |
    50.0 ms |                    *
            +---------------------
             1.00 MiB     2.00 MiB
    """
    if not marks:
        raise ValueError("a chart needs at least one mark")
    seconds, memory = [m.seconds for m in marks], [m.bytes for m in marks]
    top, bottom = milliseconds(max(seconds)), milliseconds(min(seconds))
    label = max(len(top), len(bottom))
    columns = width - label - 2
    grid = [[" "] * columns for _ in range(height)]
    for mark in marks:
        row = _position(mark.seconds, max(seconds), min(seconds), height)
        column = _position(mark.bytes, min(memory), max(memory), columns)
        grid[row][column] = mark.symbol
    labels = [top, *[""] * (height - 2), bottom]
    lines = [f"{text:>{label}} |{''.join(row)}" for text, row in zip(labels, grid, strict=True)]
    left, right = size(min(memory)), size(max(memory))
    lines.append(f"{'':>{label}} +{'-' * columns}")
    lines.append(f"{'':>{label}}  {left}{right:>{columns - len(left)}}")
    return "\n".join(line.rstrip() for line in lines)


def _position(value: float, first: float, last: float, cells: int) -> int:
    """The cell of `value` when `first` is in cell 0 and `last` in the last one."""
    return round((value - first) / (last - first) * (cells - 1)) if last != first else 0
