from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ir.timeline import Stream, Task, Track
from shardwright.simulate.time.timeline import schedule

TRACKS = [Track(f"stage {i}", stream) for i in range(2) for stream in Stream]


@st.composite
def programs(draw):
    tasks = []
    for number in range(draw(st.integers(1, 8))):
        before = st.lists(st.integers(0, number - 1), max_size=3) if number else st.just([])
        track = draw(st.sampled_from(TRACKS))
        tasks.append(Task(str(number), track, draw(st.integers(0, 5)), tuple(draw(before))))
    return tasks


def longest_chain(tasks):
    """The heaviest way through what waits for what, found by walking back from every task."""

    @cache
    def end(number):
        before = list(tasks[number].after)
        before += [i for i in range(number) if tasks[i].track == tasks[number].track]
        return tasks[number].seconds + max((end(i) for i in before), default=0)

    return max(end(number) for number in range(len(tasks)))


@given(programs())
@settings(max_examples=60)
def test_a_step_is_as_long_as_its_longest_chain(tasks):
    found = schedule(tasks)
    assert found.seconds == longest_chain(tasks)
    for track in TRACKS:
        mine = [
            (start, start + task.seconds)
            for task, start in zip(tasks, found.starts, strict=True)
            if task.track == track
        ]
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
        assert found.busy(track) <= found.seconds


@given(programs(), st.data())
@settings(max_examples=30)
def test_less_work_never_takes_longer(tasks, data):
    number = data.draw(st.integers(0, len(tasks) - 1))
    shorter = list(tasks)
    shorter[number] = Task("", tasks[number].track, 0, tasks[number].after)
    assert schedule(shorter).seconds <= schedule(tasks).seconds


def test_what_is_exposed_is_what_runs_alone():
    here, link = TRACKS[:2]
    tasks = [
        Task("a", here, 2),
        Task("sum", link, 5, (0,)),
        Task("b", here, 1, (0,)),
        Task("c", here, 1, (1,)),
    ]
    found = schedule(tasks)
    assert found.starts == (0, 2, 2, 7)
    assert (found.busy(link), found.alone(link, here)) == (5, 4)
    assert found.alone(here, link) == 3


def test_a_task_that_comes_after_a_later_one_is_refused():
    with pytest.raises(ValueError, match=r"task 0 \(a\) comes after \(1,\)"):
        schedule([Task("a", TRACKS[0], 1, (1,)), Task("b", TRACKS[0], 1)])
