"""Finds how few micro-batches of a pipeline stand for all: those of its steady passes repeat.

Under 1F1B a group makes some forward passes ahead, then one backward and one forward pass in turns.
In the program of few micro-batches such a pair of passes is repeated for those that were left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules.registry import orders
from shardwright.ir.schedules.schedule import Kind, Pass
from shardwright.program.step.instructions import Forward, StepInstruction
from shardwright.program.step.sections import NotPeriodicError, Section, is_same
from shardwright.program.step.step_program import StepProgram

# Micro-batches besides those that are ahead: of the first pair, which finds no gradients of an
# earlier one, of two equal pairs, and of the pair behind them.
_MORE = 4


def few_micro_batches(pipeline: Pipeline, micro_batches: int) -> int:
    """The number of micro-batches to lower; all if the passes of a group do not repeat."""
    count = pipeline.groups + _MORE
    if count >= micro_batches:
        return micro_batches
    given = pipeline.schedule, pipeline.groups, pipeline.stages
    pairs = zip(orders(*given, count), orders(*given, micro_batches), strict=True)
    same = all(_extended(few, micro_batches - count) == tuple(many) for few, many in pairs)
    return count if same else micro_batches


def _extended(order: Sequence[Pass], more: int) -> tuple[Pass, ...] | None:
    """The order with the second pair of steady passes repeated for `more` micro-batches."""
    begin = _passes_ahead(order) + 1
    first, second = (
        next((i for i, one in enumerate(order) if one[1:] == (number, Kind.FORWARD)), None)
        for number in (begin, begin + 1)
    )
    if first is None or second is None:
        return None
    pair = order[first:second]
    pairs = [one._replace(number=one.number + n) for n in range(more + 1) for one in pair]
    rest = [one._replace(number=one.number + more) for one in order[second:]]
    return (*order[:first], *pairs, *rest)


def _passes_ahead(order: Sequence[Pass]) -> int:
    """The number of passes before the first backward pass."""
    return next(i for i, one in enumerate(order) if one.kind is not Kind.FORWARD)


def steady_batch(pipeline: Pipeline, group: int, micro_batches: int) -> int:
    """The micro-batch whose forward pass begins the second pair of steady passes of a group."""
    given = pipeline.schedule, pipeline.groups, pipeline.stages, micro_batches
    return _passes_ahead(orders(*given)[group]) + 1


def steady_pairs(program: StepProgram, first: int) -> tuple[Section, Section]:
    """The pair of passes that begins with the micro-batch `first`, and the next pair.

    Raises `NotPeriodicError` if they do not do the same.
    """
    starts = [_first_run(program.instructions, first + n) for n in range(3)]
    pairs = Section(starts[0], starts[1]), Section(starts[1], starts[2])
    one, other = (program.instructions[pair.start : pair.stop] for pair in pairs)
    if len(one) != len(other) or not all(
        is_same(program, a, b) for a, b in zip(one, other, strict=True)
    ):
        raise NotPeriodicError("passes of two micro-batches do not do the same")
    return pairs


def _first_run(instructions: Sequence[StepInstruction], batch: int) -> int:
    """The index of the first forward pass of a micro-batch."""
    for at, one in enumerate(instructions):
        if isinstance(one, Forward) and one.call.endswith(f"@{batch}"):
            return at
    raise NotPeriodicError(f"micro-batch {batch} runs no region")
