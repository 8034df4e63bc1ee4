"""Repeats instructions of a step program of few micro-batches to simulate a step of many.

All micro-batches except the first and the last run the same instructions. In a program of three,
the second micro-batch is repeated: the instructions from the first region of the second to the
first region of the third. If a micro-batch waits for a transfer that the previous one started, a
repetition waits for the transfer that the preceding repetition started.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import Forward, Recv, Send, Transfer, Wait
from shardwright.program.step.unrolled import Item, Loop, Played, transfers


class SteadyStateError(ValueError):
    """The second micro-batch of a program cannot be repeated."""


def played(order: Sequence[Item], lowered: int, micro_batches: int) -> list[Item]:
    """The instructions `order`, of `lowered` micro-batches, repeated for `micro_batches`.

    Raises `SteadyStateError` if the transfers in flight at the end of the second micro-batch differ
    from those at its start.
    """
    if micro_batches <= lowered:
        return list(order)
    return repeated(order, 1, micro_batches - lowered + 1)


def repeated(order: Sequence[Item], first: int, times: int) -> list[Item]:
    """The instructions from the micro-batch `first` to the next one run so many `times`.

    Raises `SteadyStateError` as `played` does.
    """
    start, end = (_first_run(order, str(batch)) for batch in (first, first + 1))
    again = order[start:end]
    waited, left = _matched(again)
    found = [one for one in _matched(order[:start])[1] if one.transfer in waited]
    if [_form(one) for one in found] != [_form(one) for one in left]:
        raise SteadyStateError("the second micro-batch leaves other transfers than it finds")
    names = [one.transfer for one in left]
    loop = Loop(
        times,
        lambda _: again,
        lambda _: names,
        [1] * len(names),
        renames=dict(zip(names, (one.transfer for one in found), strict=True)),
        passes=True,
    )
    return [*order[:start], loop, *order[end:]]


def _first_run(order: Sequence[Item], batch: str) -> int:
    """The index of the first `Forward` of the micro-batch with the number `batch`."""
    for position, one in enumerate(order):
        if isinstance(one, Loop) or not isinstance(one.instruction, Forward):
            continue
        if one.instruction.call.partition("@")[2] == batch:
            return position
    raise SteadyStateError(f"micro-batch {batch} runs no region")


def _matched(order: Iterable[Item]) -> tuple[set[Hashable], list[Played]]:
    """The transfers that are waited for, and those that are started and not waited for."""
    started, waited = [], set()
    for one in transfers(order):
        if not isinstance(one.instruction, Wait):
            started.append(one)
        else:
            waited.add(one.transfer)
    return waited, [one for one in started if one.transfer not in waited]


def _form(one: Played) -> tuple[object, ...]:
    match one.instruction:
        case Transfer() as sent:
            return sent.collective, sent.channel, sent.bytes
        case HostCopy() as copy:
            return copy.channel, copy.shape, copy.dtype
        case Send() | Recv() as sent:
            return sent.channel, tuple((part.shape, part.dtype) for part in sent.payload)
    raise AssertionError("only these are in flight")
