"""Matches the operations in which several groups of a pipeline take part.

A message is a send and a receive; a collective over groups is one operation of each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.program.step.instructions import StepInstruction


class GroupPart(NamedTuple):
    """One group's part of a message or collective of several groups, after its tasks `after`.

    It is of a micro-batch so many `later` than the instruction, which is repeated.
    """

    group: int
    one: StepInstruction
    after: tuple[int, ...]
    later: int


class Links:
    """Matches operations of several groups; each runs when all its members have started it.

    The nth operation of a group on a channel matches the nth operation of the other groups.
    """

    def __init__(self) -> None:
        self._parts: defaultdict[tuple[str, int], list[GroupPart]] = defaultdict(list)
        self._counts: defaultdict[tuple[str, int], int] = defaultdict(int)

    def join(
        self, channel: str, size: int, part: GroupPart
    ) -> tuple[tuple[str, int], Sequence[GroupPart] | None]:
        """Add a group's part; return the operation's key, and all its parts if it is complete."""
        count = self._counts[channel, part.group]
        self._counts[channel, part.group] += 1
        key = channel, count
        self._parts[key].append(part)
        return key, self._parts.pop(key) if len(self._parts[key]) == size else None
