"""How many micro-batches of a pipeline stand for all."""

import pytest

from shardwright.ir.pipeline import Pipeline
from shardwright.program.step.steady_passes import few_micro_batches, steady_batch


@pytest.mark.parametrize(
    ("schedule", "groups", "stages", "count", "few"),
    [
        ("1F1B", 4, 4, 64, 8),
        ("1F1B", 4, 4, 9, 8),
        ("1F1B", 4, 4, 8, 8),
        ("1F1B", 2, 2, 3, 3),
        ("GPipe", 4, 4, 64, 64),  # its forward passes all come first
        ("Interleaved1F1B", 2, 4, 64, 64),  # its passes repeat by as many micro-batches as groups
    ],
)
def test_passes_of_1f1b_repeat(schedule, groups, stages, count, few):
    pipeline = Pipeline(tuple(f"op{i}" for i in range(1, stages)), schedule, groups)
    assert few_micro_batches(pipeline, count) == few


def test_the_second_pair_of_steady_passes_is_repeated():
    pipeline = Pipeline(("a", "b", "c"), "1F1B", 4)
    assert [steady_batch(pipeline, group, 8) for group in range(4)] == [5, 4, 3, 2]
