"""What schedules keep and take, by the papers."""

import pytest

from shardwright.simulate.time.pipeline_schedules import waiting
from shardwright.simulate.time.pipelines import StageTime, step_seconds

# What the papers say that a step takes, in units of one group's work on one micro-batch.
PAPERS = [
    ("GPipe", 1, lambda p, m: m + p - 1),
    ("1F1B", 1, lambda p, m: m + p - 1),
    ("Interleaved1F1B", 2, lambda p, m: m + (p - 1) / 2),
    ("Interleaved1F1B", 4, lambda p, m: m + (p - 1) / 4),
    ("InterleavedZeroBubble", 1, lambda p, m: m + (p - 1) / 3),
    ("ZBVZeroBubble", 2, lambda p, m: m + (p - 1) / 6),
    ("LoopedBFS", 2, lambda p, m: m + (p - 1) / 2),
]


@pytest.mark.parametrize("schedule, each, formula", PAPERS)
@pytest.mark.parametrize("groups, pieces", [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_equal_stages_take_what_the_papers_say(schedule, each, formula, groups, pieces):
    times = [StageTime(3.0 / each, 0.5 / each)] * (groups * each)
    found = step_seconds(schedule, times, pieces, groups)
    assert found == pytest.approx(3 * formula(groups, pieces) + 0.5)


def test_stages_that_do_not_split_make_whole_backward_passes():
    """If none does, ZB1P takes what 1F1B takes; nobody waits for the first."""

    def taken(whole):
        times = [StageTime(3.0, splits=stage not in whole) for stage in range(4)]
        return step_seconds("InterleavedZeroBubble", times, 8)

    assert taken({0, 1, 2, 3}) == pytest.approx(3 * 11)
    assert taken(()) == taken({0}) == pytest.approx(3 * 9)
    assert taken({0}) < taken({1}) < taken({3}) < 3 * 11


def most(schedule, groups, each, pieces):
    """Of each group, the most micro-batches that wait, in units of all of a group's stages."""
    every = waiting(schedule, groups, groups * each, pieces)
    return [moments.sum(axis=1).max() / each for moments in every]


def test_groups_keep_what_the_papers_say():
    assert most("1F1B", 4, 1, 16) == [4, 3, 2, 1]
    assert most("GPipe", 4, 1, 16) == most("LoopedBFS", 4, 2, 16) == [16] * 4
    # Megatron-LM: 1 + (p - 1) / (p v) times that of 1F1B.
    assert most("Interleaved1F1B", 4, 2, 16)[0] == 4 * (1 + 3 / 8)
    # ZB1P and ZB-V keep as much everywhere as 1F1B does on the first group.
    assert most("InterleavedZeroBubble", 4, 1, 16) == [4] * 4
    assert most("ZBVZeroBubble", 4, 2, 16) == [4] * 4
    assert most("async spectrain", 3, 1, 3) == [3, 2, 1]
