"""Step programs as text: repeated stretches once, and the differences between two programs."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.program.step.host_copies import HOST_CHANNELS
from shardwright.program.step.instructions import Forward, StepInstruction
from shardwright.program.step.step_program import StepProgram
from shardwright.report.units import size

_LEAST = 4  # lines that folding must save
_NUMBER = re.compile(r"\d+")


def program_text(program: StepProgram, *, full: bool = False) -> str:
    """The text of `program`; unless `full`, stretches that repeat with other numbers once."""
    if full:
        return str(program)
    lines = str(program).splitlines()
    instructions = [str(one) for one in program.instructions]
    carried = int(program.carried is not None)
    end = len(lines) - len(program.gradients) - len(program.updates) - carried - 1
    folded = _folded(instructions, [_key(one) for one in program.instructions])
    return "\n".join([*lines[: end - len(instructions)], *folded, *lines[end:]])


def program_summary(program: StepProgram) -> str:
    """Number of instructions and regions, and how often what is sent or copied in how many bytes.

    Bytes are those of whole tensors that are gathered or scattered, and of tensors that are summed
    or exchanged.
    """
    calls: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for one in program.transfers():
        calls[one.collective.value, one.channel] += 1
        moved[one.collective.value, one.channel] += one.bytes
    parts = [
        f"{calls[each]} {each[0]} on {each[1]} ({size(moved[each])})" for each in sorted(calls)
    ]
    for channel in HOST_CHANNELS:
        if copies := [one.bytes for one in program.host_copies() if one.channel == channel]:
            parts.append(f"{len(copies)} copies {channel} ({size(sum(copies))})")
    counted = f"{len(program.instructions)} instructions, {len(program.regions)} regions"
    return f"{counted}; {', '.join(parts) or 'no collectives'}"


def program_diff(one: StepProgram, other: StepProgram, names: tuple[str, str]) -> str:
    """The unified diff of the complete texts of two programs; empty where they are equal."""
    lines = difflib.unified_diff(
        str(one).splitlines(), str(other).splitlines(), *names, lineterm=""
    )
    return "\n".join(lines)


def _key(one: StepInstruction) -> str:
    """The text of an instruction without numbers in names, and the region that it runs."""
    region = f"{one.region}:" if isinstance(one, Forward) else ""
    return region + _NUMBER.sub("#", str(one))


def _folded(lines: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """`lines`, of stretches with equal keys that follow each other only the first."""
    known: dict[str, int] = {}
    ids = np.array([known.setdefault(key, len(known)) for key in keys], np.int64)
    starts: defaultdict[bytes, list[int]] = defaultdict(list)  # places by the ids from there on
    for place in range(len(ids) - _LEAST + 1):
        starts[ids[place : place + _LEAST].tobytes()].append(place)
    at = 0
    while at < len(lines):
        saved, period = 0, 0
        for place in starts[ids[at : at + _LEAST].tobytes()]:
            more = _repeated(ids[at:], place - at) if place > at else 0
            if more > saved:
                saved, period = more, place - at
        if saved < _LEAST:
            yield lines[at]
            at += 1
            continue
        block = slice(at, at + period)
        what = "the next line comes" if period == 1 else f"the next {period} lines come"
        yield f"# {what} {saved // period + 1} times in a row, with other numbers in names:"
        yield from (f"    {line}" for line in _folded(lines[block], keys[block]))
        at += saved + period


def _repeated(ids: NDArray[np.int64], period: int) -> int:
    """The number of entries after the first `period` that are these once more, or several times.

    >>> _repeated(np.array([1, 2, 1, 2, 1, 2, 1]), 2)
    4
    """
    differ = np.flatnonzero(ids[:-period] != ids[period:])
    run = int(differ[0]) if differ.size else len(ids) - period
    return run // period * period
