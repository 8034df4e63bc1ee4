"""Texts from files that others wrote, as they may be printed on a terminal."""

from __future__ import annotations

import re

# C0 and C1 control characters, and those that change the direction of a text.
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")


def check_printable(text: str) -> None:
    """Raise `ValueError` for a text that would do something to a terminal."""
    if found := _UNPRINTABLE.search(text):
        raise ValueError(f"{text[:60]!r} has the control character {found[0]!r}")


def printable(text: str) -> str:
    r"""The text with control characters written as escapes.

    >>> printable("\x1b[2J")
    '\\x1b[2J'
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)
