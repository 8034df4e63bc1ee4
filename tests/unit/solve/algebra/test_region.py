import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.algebra.minplus import Objectives
from shardwright.solve.algebra.region import DominatedRegion, corners_below
from shardwright.solve.elimination.problem import Point

OBJECTIVES = Objectives(np.array([1.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.5, 2.0]))
numbers = st.integers(0, 20)


def by_corner(region, values):
    times, memories = region.objectives.time, region.objectives.memory
    return [
        any(
            all(v <= a * t + b * m for v, a, b in zip(value, times, memories, strict=True))
            for t, m in zip(region.time, region.memory, strict=True)
        )
        for value in values.T
    ]


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9),
    st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=30),
)
def test_something_lies_inside_if_one_corner_allows_all_its_values(corners, given):
    time, memory = np.array(corners).T
    region = DominatedRegion(OBJECTIVES, time.astype(float), memory)
    values = np.array(given, float).T
    assert region.may_contain(values).tolist() == by_corner(region, values)


def test_of_many_corners_neighbours_are_merged_to_something_larger():
    many = np.arange(300.0)
    region = DominatedRegion(OBJECTIVES, many, np.int64(many[::-1]))
    points = np.stack([many[:, None] + np.zeros(300), np.zeros((300, 1)) + many]).reshape(2, -1)
    values = OBJECTIVES.time[:, None] * points[0] + OBJECTIVES.memory[:, None] * points[1]
    found = region.may_contain(values)
    assert found[points.sum(axis=0) <= 299].all()
    assert not found[points.sum(axis=0) >= 299 + 10].any()


def test_sums_are_what_their_parts_and_the_rest_of_their_cell_cost():
    region = DominatedRegion(OBJECTIVES, np.array([5.0]), np.array([5]))
    rest = np.array([[0.0, 3], [0, 3], [0, 4.5], [0, 9]])
    time, memory = np.array([2.0, 2, 3]), np.array([2, 2, 3])
    found = region.may_contain_sums(time, memory, rest, np.array([0, 1, 1]))
    assert found.tolist() == [True, True, False]


def test_corners_are_where_a_frontier_could_be_better():
    front = [Point(1.0, 9, ()), Point(2.0, 5, ()), Point(4.0, 2, ())]
    time, memory = corners_below(front, 0.25)
    assert time == pytest.approx([1.5, 3.0])
    assert memory.tolist() == [8, 4]
