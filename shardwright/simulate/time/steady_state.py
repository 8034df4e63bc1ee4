"""Repeats instructions of a step program of few micro-batches to simulate a step of many.

All micro-batches except the first and the last run the same instructions. In a program of three,
the second micro-batch is repeated: the instructions from the first region of the second to the
first region of the third. If a micro-batch waits for a transfer that the previous one started, a
repetition waits for the transfer that the preceding repetition started.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from shardwright.program.step.instructions import Forward, Transfer, Wait
from shardwright.program.step.unrolled import Played


class SteadyStateError(ValueError):
    """The second micro-batch of a program cannot be repeated."""


def played(order: Sequence[Played], lowered: int, micro_batches: int) -> list[Played]:
    """The instructions `order`, of `lowered` micro-batches, repeated for `micro_batches`.

    Transfers are numbered in the order in which they are started. Raises `SteadyStateError` if the
    transfers in flight at the end of the second micro-batch differ from those at its start.
    """
    numbers = _Numbers()
    if micro_batches <= lowered:
        return list(numbers.of(order))
    start, end = (_first_run(order, batch) for batch in ("1", "2"))
    repeated = order[start:end]
    waited = _waited(repeated)
    found = [one for one in _in_flight(order[:start]) if one.transfer in waited]
    left = _in_flight(repeated)
    if [_form(one) for one in found] != [_form(one) for one in left]:
        raise SteadyStateError("the second micro-batch leaves other transfers than it finds")
    result = list(numbers.of(order[:start]))
    for _ in range(micro_batches - lowered + 1):
        result += numbers.of(repeated)
        for one, latest in zip(found, left, strict=True):
            numbers.known[one.transfer] = numbers.known[latest.transfer]
    return [*result, *numbers.of(order[end:])]


class _Numbers:
    """Numbers transfers in the order of their start; `known` has the latest number by name."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}
        self._next = 0

    def of(self, order: Sequence[Played]) -> Iterator[Played]:
        for one in order:
            if one.transfer is None:
                yield one
                continue
            if isinstance(one.instruction, Transfer):
                self.known[one.transfer] = self._next
                self._next += 1
            yield Played(one.instruction, self.known[one.transfer])


def _first_run(order: Sequence[Played], batch: str) -> int:
    """The index of the first `Forward` of the micro-batch with the number `batch`."""
    for position, (one, _) in enumerate(order):
        if isinstance(one, Forward) and one.call.partition("@")[2] == batch:
            return position
    raise SteadyStateError(f"micro-batch {batch} runs no region")


def _in_flight(order: Sequence[Played]) -> list[Played]:
    """The transfers in `order` that are not waited for, in the order of their start."""
    waited = _waited(order)
    return [
        one for one in order if isinstance(one.instruction, Transfer) and one.transfer not in waited
    ]


def _waited(order: Sequence[Played]) -> set[Hashable]:
    return {one.transfer for one in order if isinstance(one.instruction, Wait)}


def _form(one: Played) -> tuple[object, ...]:
    transfer = one.instruction
    assert isinstance(transfer, Transfer)
    return transfer.collective, transfer.channel, transfer.bytes
