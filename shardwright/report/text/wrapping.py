"""Breaks lines that are too long; what a line continues is indented below the last column."""

from __future__ import annotations

import re
import textwrap

WIDTH = 100  # columns of text that is not on a terminal
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")


def hanging(line: str, width: int) -> list[str]:
    """A line in parts of at most `width` columns, broken at spaces alone.

    Further parts are indented as far as the last text behind two spaces or more that starts in the
    left half; without such text, by two columns more than the line.
    """
    if len(line) <= width:
        return [line]
    start = len(line) - len(line.lstrip())
    columns = [start, *(one.end() for one in _GAP.finditer(line) if one.end() <= width // 2)]
    first = columns[-1]
    indent = first if first else 2
    return textwrap.wrap(
        line[first:],
        width,
        initial_indent=line[:first],
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
