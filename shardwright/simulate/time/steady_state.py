"""The order in which a step program of few micro-batches is played for a step of many.

All micro-batches but the first and the last do the same. A program of three is played so that its
second one comes as often as the step needs: from the second one's first run of a region up to the
third one's. What was started in one micro-batch and is waited for in the next is then what the one
before started at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.program.step.instructions import (
    Forward,
    StepInstruction,
    StepProgram,
    Transfer,
    Wait,
)


class Played(NamedTuple):
    """An instruction; of a `Transfer` or a `Wait` the number of the transfer, of others -1."""

    instruction: StepInstruction
    transfer: int = -1


class SteadyStateError(ValueError):
    """A program whose second micro-batch cannot come several times."""


def played(program: StepProgram, micro_batches: int) -> list[Played]:
    """The instructions of `program`, which may have fewer, for so many `micro_batches`.

    Raises `SteadyStateError` where what the second micro-batch leaves in flight is not what it
    finds in flight.
    """
    order = program.instructions
    numbers = _Numbers()
    lowered = max((number for _, number, _ in program.inputs), default=0) + 1
    if micro_batches <= lowered:
        return list(numbers.of(order))
    start, end = (_first_run(order, batch) for batch in ("1", "2"))
    repeated = order[start:end]
    found = [one for one in _in_flight(order[:start]) if one.handle in _waited(repeated)]
    left = _in_flight(repeated)
    if [_form(one) for one in found] != [_form(one) for one in left]:
        raise SteadyStateError("the second micro-batch leaves other transfers than it finds")
    result = list(numbers.of(order[:start]))
    for _ in range(micro_batches - lowered + 1):
        result += numbers.of(repeated)
        for one, latest in zip(found, left, strict=True):
            numbers.known[one.handle] = numbers.known[latest.handle]
    return [*result, *numbers.of(order[end:])]


class _Numbers:
    """Numbers of transfers while instructions are played; `known` has the latest by handle."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._next = 0

    def of(self, order: Sequence[StepInstruction]) -> Iterator[Played]:
        for one in order:
            if isinstance(one, Transfer):
                self.known[one.handle] = self._next
                self._next += 1
            number = self.known[one.handle] if isinstance(one, Transfer | Wait) else -1
            yield Played(one, number)


def _first_run(order: Sequence[StepInstruction], batch: str) -> int:
    """The place of the first run of a region in the micro-batch with this number."""
    for place, one in enumerate(order):
        if isinstance(one, Forward) and one.call.partition("@")[2] == batch:
            return place
    raise SteadyStateError(f"micro-batch {batch} runs no region")


def _in_flight(order: Sequence[StepInstruction]) -> list[Transfer]:
    """The transfers that are started and not waited for, in the order of their start."""
    waited = _waited(order)
    return [one for one in order if isinstance(one, Transfer) and one.handle not in waited]


def _waited(order: Sequence[StepInstruction]) -> set[str]:
    return {one.handle for one in order if isinstance(one, Wait)}


def _form(one: Transfer) -> tuple[object, ...]:
    return one.collective, one.channel, one.bytes
