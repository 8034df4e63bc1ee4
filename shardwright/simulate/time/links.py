"""Matches the operations in which several groups of a pipeline take part.

A message is a send and a receive; a collective over groups is one operation of each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.ir.pipeline import AXIS
from shardwright.program.step.channels import axis_of
from shardwright.program.step.folding.unrolled import Item, Loop
from shardwright.program.step.instructions import Recv, Send, StepInstruction, Transfer
from shardwright.program.step.step_program import StepProgram
from shardwright.simulate.time.step_program import StepPrices


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


def is_message(one: Item) -> bool:
    """Whether several groups may take part in an instruction."""
    if isinstance(one, Loop):
        return one.micro_batches > 0
    match one.instruction:
        case Send() | Recv():
            return True
        case Transfer() as sent:
            return axis_of(sent.channel) == AXIS
    return False


def messages_contend(program: StepProgram, prices: StepPrices) -> bool:
    """Whether messages of a program delay transfers on other links."""
    links = [name for name in dict.fromkeys(prices.links.values()) if axis_of(name) != AXIS]
    channels = dict.fromkeys(
        [one.channel for one in program.messages()]
        + [one.channel for one in program.transfers() if axis_of(one.channel) == AXIS]
    )
    return any(prices.contention(channel, link) for channel in channels for link in links)


def name_of(one: Recv, later: int) -> str:
    """The name of a message: values or gradients, and the number of the micro-batch from 1."""
    number = one.payload[0].value.rpartition("@")[2] if one.payload else ""
    what = "gradients" if one.backward else "values"
    return f"receive {what} {int(number) + 1 + later if number.isdigit() else 1}"
