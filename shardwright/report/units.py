"""Formats seconds, bytes, counts and collectives: ms, MiB, GiB, millions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def milliseconds(seconds: float) -> str:
    """Time in ms with about three digits, or in seconds from a hundred.

    >>> milliseconds(0.0123456), milliseconds(1.5), milliseconds(504.666)
    ('12.3 ms', '1500 ms', '505 s')
    """
    value = seconds * 1e3
    return f"{value:.{_decimals(value)}f} ms" if seconds < 100 else f"{seconds:.0f} s"


def duration(seconds: float) -> str:
    """Time in seconds with about three digits, or in ms below one.

    >>> duration(25.4189), duration(0.0123456)
    ('25.4 s', '12.3 ms')
    """
    return f"{seconds:.{_decimals(seconds)}f} s" if seconds >= 1 else milliseconds(seconds)


def size(count: float) -> str:
    """Bytes in the largest unit that gives at least one.

    >>> size(3 * 2**29), size(300 * 2**20), size(0.6 * 2**20)
    ('1.50 GiB', '300 MiB', '614 KiB')
    """
    unit, power = ("GiB", 30) if count >= 2**30 else ("MiB", 20) if count >= 2**20 else ("KiB", 10)
    value = count / 2**power
    return f"{value:.{_decimals(value)}f} {unit}"


def count(number: int) -> str:
    """A number with about three digits, in billions or millions from a million.

    >>> count(8_030_261_248), count(124_439_808), count(4_737)
    ('8.03 B', '124 M', '4,737')
    """
    if number < 1e6:
        return f"{number:,}"
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.{_decimals(value)}f} {unit}"


def steps(collectives: Sequence[str]) -> str:
    """The collectives of a transfer in the order in which they run.

    >>> steps(["all_gather cp", "all_gather dp_shard"]), steps(["all_to_all ep"] * 2)
    ('all_gather cp + all_gather dp_shard', 'all_to_all ep (twice)')
    """
    counted = ((name, len([*same])) for name, same in groupby(collectives))
    often = {1: "", 2: " (twice)"}
    return " + ".join(f"{name}{often.get(n, f' ({n} times)')}" for name, n in counted)


def _decimals(value: float) -> int:
    """The number of decimals that gives three digits after rounding: 9.999 is 10.0."""
    return 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
