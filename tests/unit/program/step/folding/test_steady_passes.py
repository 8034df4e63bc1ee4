"""How few micro-batches of a pipeline stand for all, by the orders of its passes."""

from itertools import pairwise

import pytest

from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules.registry import orders
from shardwright.program.step.folding.steady_passes import few_micro_batches


def _pipeline(schedule, groups, each):
    return Pipeline(tuple(f"op{i}" for i in range(1, groups * each)), schedule, groups)


@pytest.mark.parametrize(
    ("schedule", "groups", "each", "count", "few"),
    [
        ("1F1B", 4, 1, 64, (8, 1)),
        ("1F1B", 4, 1, 9, (8, 1)),
        ("1F1B", 4, 1, 8, None),
        ("1F1B", 2, 1, 3, None),
        ("GPipe", 4, 1, 64, None),  # its forward passes all come first
        ("LoopedBFS", 2, 2, 64, None),  # so do these
        ("Interleaved1F1B", 2, 2, 64, (10, 2)),  # rounds of as many as there are groups
        ("Interleaved1F1B", 4, 3, 64, (20, 4)),
        ("InterleavedZeroBubble", 4, 1, 64, (10, 1)),  # in rounds of its own
        ("InterleavedZeroBubble", 4, 2, 64, (20, 4)),
        ("ZBVZeroBubble", 2, 2, 64, (8, 1)),
        ("ZBVZeroBubble", 4, 2, 64, (12, 1)),
    ],
)
def test_passes_repeat(schedule, groups, each, count, few):
    found = few_micro_batches(_pipeline(schedule, groups, each), count)
    assert (None if found is None else (found.count, found.cycle)) == few


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_order_of_all_follows_from_that_of_few(schedule):
    count, pipeline = 60, _pipeline(schedule, 3, 1 if schedule == "1F1B" else 2)
    few = few_micro_batches(pipeline, count)
    given = pipeline.schedule, pipeline.groups, pipeline.stages
    pairs = zip(orders(*given, few.count), orders(*given, count), strict=True)
    for group, (order, whole) in enumerate(pairs):
        repeat = few.repeat(pipeline, group, count)
        begin = few.starts[group]
        at, then = (order.index(begin._replace(number=begin.number + n)) for n in (0, few.cycle))
        found = [
            one._replace(number=one.number + n * few.cycle)
            for n in range(repeat.times)
            for one in order[at:then]
        ]
        more = count - few.count
        behind = [one._replace(number=one.number + more) for one in order[then:]]
        assert (*order[:at], *found, *behind) == whole
        assert [b.number - a.number for a, b in pairwise(repeat.starts)] == [few.cycle] * 2
