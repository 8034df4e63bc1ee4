"""Repeats instructions of a step program of few micro-batches to simulate a step of many.

All micro-batches except the first and the last run the same instructions. In a program of three,
the second micro-batch is repeated: the instructions from the first region of the second to the
first region of the third. If a micro-batch waits for a transfer that the previous one started, a
repetition waits for the transfer that the preceding repetition started.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations

from shardwright.program.step.folding.steady_passes import RepeatedPasses, Start
from shardwright.program.step.folding.unrolled import Item, Loop, Played, transfers
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import Recv, Send, Transfer, Wait, writes


class SteadyStateError(ValueError):
    """The second micro-batch of a program cannot be repeated."""


def played(order: Sequence[Item], lowered: int, micro_batches: int) -> list[Item]:
    """The instructions `order`, of `lowered` micro-batches, repeated for `micro_batches`.

    Raises `SteadyStateError` if the transfers in flight at the end of the second micro-batch differ
    from those at its start.
    """
    if micro_batches <= lowered:
        return list(order)
    starts = Start("", 1), Start("", 2)
    return repeated(order, RepeatedPasses(starts, micro_batches - lowered + 1, 1))


def repeated(
    order: Sequence[Item], repeat: RepeatedPasses, played: int | None = None
) -> list[Item]:
    """The instructions with the first cycle of `repeat` as often as it says, or `played` times.

    Raises `SteadyStateError` as `played` does.
    """
    start, end = (_first_run(order, one) for one in repeat.starts[:2])
    again = order[start:end]
    found, left = _in_flight(order[:start]), _in_flight(order[:end])
    if [_form(one) for one in found] != [_form(one) for one in left]:
        raise SteadyStateError("a cycle of passes leaves other transfers than it finds")
    names = [one.transfer for one in left]
    played = repeat.times if played is None else played
    loop = Loop(
        played,
        lambda _: again,
        lambda _: names,
        [1] * len(names),
        renames=dict(zip(names, (one.transfer for one in found), strict=True)),
        micro_batches=repeat.micro_batches,
        left_out=repeat.times - played,
    )
    return [*order[:start], loop, *_with_sums(order, repeat, end)]


def _with_sums(order: Sequence[Item], repeat: RepeatedPasses, end: int) -> Iterator[Item]:
    """The instructions from `end` on; transfers of values of all micro-batches have all of them.

    Those are sums of results, which have a part from each cycle.
    """
    starts = [_first_run(order, one) for one in repeat.starts]
    made = [_made(order[slice(*cycle)]) for cycle in pairwise(starts)]
    cycles = [one - other for one, other in permutations(made, 2)]  # names of their own
    for at, one in enumerate(order[end:], end):
        if isinstance(one, Played) and isinstance(one.instruction, Transfer) and at >= starts[-1]:
            parts = one.instruction.parts
            found = [[part for part in parts if part.value in own] for own in cycles]
            if found and all(found):
                more = found[0] * (repeat.times - 1)
                one = one._replace(instruction=replace(one.instruction, parts=(*parts, *more)))
        yield one


def _made(order: Iterable[Item]) -> set[str]:
    """The names that instructions write, without those of loops."""
    return {name for one in order if isinstance(one, Played) for name in writes(one.instruction)}


def _first_run(order: Sequence[Item], start: Start) -> int:
    """The index of the first region of a stage and micro-batch."""
    for position, one in enumerate(order):
        if not isinstance(one, Loop) and start.is_begun_by(one.instruction):
            return position
    raise SteadyStateError(f"micro-batch {start.number} runs no region")


def _in_flight(order: Iterable[Item]) -> list[Played]:
    """The transfers that are started and not waited for, in order."""
    started: dict[Hashable, Played] = {}
    for one in transfers(order):
        if isinstance(one.instruction, Wait):
            del started[one.transfer]
        else:
            started[one.transfer] = one
    return list(started.values())


def _form(one: Played) -> tuple[object, ...]:
    match one.instruction:
        case Transfer() as sent:
            return sent.collective, sent.channel, sent.bytes
        case HostCopy() as copy:
            return copy.channel, copy.shape, copy.dtype
        case Send() | Recv() as sent:
            return sent.channel, tuple((part.shape, part.dtype) for part in sent.payload)
    raise AssertionError("only these are in flight")
