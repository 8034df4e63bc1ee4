"""Finds how few micro-batches of a pipeline stand for all: those of its steady passes repeat.

Between the passes that fill a pipeline and those that empty it, each group runs the same cycle of
passes again and again, each time for later micro-batches: under 1F1B a backward and a forward pass,
of one micro-batch; under interleaved 1F1B those of all its stages, of about as many micro-batches
as there are groups. The cycle is found in the orders of passes themselves. In the program of few
micro-batches the second cycle is repeated for those that were left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules.registry import orders, schedule_named
from shardwright.ir.schedules.schedule import Kind, Pass
from shardwright.program.step.folding.equal_instructions import is_same
from shardwright.program.step.folding.sections import NotPeriodicError, Section
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Forward,
    Recv,
    Send,
    StepInstruction,
    Transfer,
    Wait,
)
from shardwright.program.step.lower.pipelines.messages import Message, PassMessages, steps
from shardwright.program.step.step_program import StepProgram


class Start(NamedTuple):
    """The first forward region of micro-batch `number` in the stage whose calls have `prefix`."""

    prefix: str
    number: int

    def is_begun_by(self, one: StepInstruction) -> bool:
        """Whether an instruction runs a region of that stage and micro-batch."""
        if not isinstance(one, Forward):
            return False
        name, _, number = one.call.partition("@")
        return name.startswith(self.prefix) and number == str(self.number)


class RepeatedPasses(NamedTuple):
    """Instructions of a group from the first of `starts` to the second, which run `times` times.

    From each of `starts` on the same cycle runs, of so many `micro_batches` later.
    """

    starts: tuple[Start, ...]
    times: int
    micro_batches: int


@dataclass(frozen=True)
class FewMicroBatches:
    """The micro-batches of a pipeline to lower: `count`, those of a cycle, and where it starts.

    `starts` has the forward pass of each group that begins its second cycle.
    """

    count: int
    cycle: int
    starts: tuple[Pass, ...]

    def repeat(self, pipeline: Pipeline, group: int, micro_batches: int) -> RepeatedPasses:
        """The cycle of a group, with how many times it runs in a step of `micro_batches`."""
        stage, number, _ = self.starts[group]
        prefix = f"s{stage}." if pipeline.stages > pipeline.groups else ""
        starts = tuple(Start(prefix, number + n * self.cycle) for n in range(3))
        times = 1 + (micro_batches - self.count) // self.cycle
        return RepeatedPasses(starts, times, self.cycle)


@lru_cache(maxsize=64)
def few_micro_batches(pipeline: Pipeline, micro_batches: int) -> FewMicroBatches | None:
    """The micro-batches to lower; None if all: there are few, or their passes do not repeat."""
    whole = orders(pipeline.schedule, pipeline.groups, pipeline.stages, micro_batches)
    for cycle in range(1, min(2 * pipeline.groups, micro_batches // 3) + 1):
        lengths = [cycle * len(order) // micro_batches for order in whole]
        if all(_has_cycle(*one, cycle) for one in zip(whole, lengths, strict=True)):
            for count in range(3 * cycle + micro_batches % cycle, micro_batches, cycle):
                starts = _starts(pipeline, count, micro_batches, cycle)
                if starts is not None:
                    return FewMicroBatches(count, cycle, starts)
            return None
    return None


def _starts(
    pipeline: Pipeline, count: int, micro_batches: int, cycle: int
) -> tuple[Pass, ...] | None:
    """By group, where the second cycle starts in the order of `count` micro-batches.

    None if these do not stand for all.
    """
    given = pipeline.schedule, pipeline.groups, pipeline.stages
    if schedule_named(pipeline.schedule).needs(pipeline.groups, pipeline.stages, count):
        return None
    few, left_out = orders(*given, count), micro_batches - count
    places = [
        _places(*pair, cycle, left_out)
        for pair in zip(few, orders(*given, micro_batches), strict=True)
    ]
    if not all(places):
        return None
    found = []
    for order, messages, possible in zip(few, steps(*given, count), places, strict=True):
        length = cycle * len(order) // count
        at = next((at for at in possible if _messages_repeat(messages, at, length, cycle)), None)
        if at is None:
            return None
        found.append(order[at])
    return tuple(found)


def _later(one: Pass, number: int) -> Pass:
    return one._replace(number=one.number + number)


def _has_cycle(order: Sequence[Pass], length: int, cycle: int) -> bool:
    """Whether passes in the middle of an order are those so many places before, `cycle` later."""
    middle = len(order) // 2
    places = range(middle, min(middle + length, len(order)))
    return middle >= length and all(order[at] == _later(order[at - length], cycle) for at in places)


def _places(few: Sequence[Pass], many: Sequence[Pass], cycle: int, left_out: int) -> list[int]:
    """The places of `few` from where on its cycle, repeated for those `left_out`, gives `many`.

    At each begins a forward pass. This cycle and the equal one behind it contain neither the first
    nor the last pass of a stage and kind: the first backward pass finds no gradients, for example,
    and gathered parameters are freed after the last one.
    """
    more = len(many) - len(few)
    length = more * cycle // left_out
    at: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for place, one in enumerate(few):
        at[one.stage, one.kind].append(place)
    begin = max(places[:2][-1] for places in at.values()) + 1
    end = min(places[-1] for places in at.values())
    behind = _common([_later(one, left_out) for one in reversed(few)], many[::-1])
    first = max(begin, len(few) - behind - length)
    last = min(end - 2 * length, _common(few, many) - length)
    rest = range(first + length, last + length + more)
    if first > last or any(many[i] != _later(many[i - length], cycle) for i in rest):
        return []
    return [place for place in range(first, last + 1) if few[place].kind is Kind.FORWARD]


def _common(one: Sequence[Pass], other: Sequence[Pass]) -> int:
    """The number of first passes that are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _messages_repeat(found: Sequence[PassMessages], start: int, length: int, cycle: int) -> bool:
    """Whether the cycle at a place has the messages of the cycle behind it.

    So must the next pass, and the next message, which the group starts to receive in the cycle
    (`passes/receive_early.py`).
    """
    places = range(start, start + length + 1)
    if any(found[at].later(cycle) != found[at + length] for at in places):
        return False
    one, other = (_next_received(found[start + n * length + 1 :]) for n in (1, 2))
    return one is other is None or (one is not None and one.later(cycle) == other)


def _next_received(found: Sequence[PassMessages]) -> Message | None:
    """The first message that passes receive."""
    return next((message for one in found for message in one.posts), None)


def steady_cycles(program: StepProgram, repeat: RepeatedPasses) -> tuple[Section, Section]:
    """The cycle of passes that is repeated, and the next one.

    Raises `NotPeriodicError` if they do not do the same, or wait for other transfers.
    """
    starts = [_first_run(program.instructions, one) for one in repeat.starts]
    found = [Section(*pair) for pair in pairwise(starts)]
    one, other = (program.instructions[cycle.start : cycle.stop] for cycle in found)
    if len(one) != len(other) or not all(
        is_same(program, a, b) for a, b in zip(one, other, strict=True)
    ):
        raise NotPeriodicError("passes of two cycles of micro-batches do not do the same")
    before, behind = (_in_flight(program.instructions[: cycle.start]) for cycle in found)
    if len(before) != len(behind):
        raise NotPeriodicError("a cycle of passes leaves other transfers in flight than it finds")
    later = dict(zip(before, behind, strict=True))
    later.update(zip(_handles(one, waits=False), _handles(other, waits=False), strict=True))
    waited = zip(_handles(one, waits=True), _handles(other, waits=True), strict=True)
    if any(later[a] != b for a, b in waited):
        raise NotPeriodicError("passes of two cycles of micro-batches wait for other transfers")
    return found[0], found[1]


def _handles(instructions: Sequence[StepInstruction], *, waits: bool) -> Iterator[str]:
    """The names of transfers that are waited for, or of those that are started."""
    for one in instructions:
        if isinstance(one, Wait | Transfer | HostCopy | Send | Recv) and waits is isinstance(
            one, Wait
        ):
            yield one.handle


def _in_flight(instructions: Sequence[StepInstruction]) -> list[str]:
    """The transfers that are started and not waited for, in order."""
    waited = set(_handles(instructions, waits=True))
    return [handle for handle in _handles(instructions, waits=False) if handle not in waited]


def _first_run(instructions: Sequence[StepInstruction], start: Start) -> int:
    """The index of the first region of a stage and micro-batch."""
    for at, one in enumerate(instructions):
        if start.is_begun_by(one):
            return at
    raise NotPeriodicError(f"micro-batch {start.number} runs no region")
