import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given

from shardwright.solve.elimination.schedule import Join, elimination_order, make_schedule
from tests.harness.generators import layered_problem, problems, random_problem

COMPLETE = [(i, j) for i in range(6) for j in range(i)]


def grid(rows, columns):
    down = [(i, i + columns) for i in range((rows - 1) * columns)]
    return down + [(i, i + 1) for i in range(rows * columns) if (i + 1) % columns]


def joins(problem, max_table=10**6):
    tables = make_schedule(problem, max_table).tables
    return [table for table in tables if isinstance(table, Join)]


@given(problems())
def test_every_node_is_eliminated_once_and_every_factor_used_once(problem):
    schedule = make_schedule(problem, 10**6)
    nodes = [step.node for step in schedule.steps if step.node is not None]
    assert sorted(nodes) == list(range(len(problem.nodes)))
    used = [number for step in schedule.steps for number in step.inputs]
    assert sorted([*used, schedule.root]) == list(range(len(schedule.factors)))
    assert schedule.factors[schedule.root].scope == ()


@given(problems())
def test_parallel_tables_are_multiplied_before_a_node_is_eliminated(problem):
    schedule = make_schedule(problem, 10**6)
    for step in schedule.steps:
        scopes = [set(schedule.factors[number].scope) for number in step.inputs]
        if step.node is not None:
            assert not any(a <= b for a, b in permutations(scopes, 2))


def test_a_node_next_to_one_just_eliminated_waits():
    ring = [{(i - 1) % 8, (i + 1) % 8} for i in range(8)]
    assert elimination_order(ring, [2] * 8, 4)[0][:4] == [0, 2, 4, 6]


def test_a_node_waits_for_neighbours_of_a_single_choice():
    star = [{1, 2, 3}, {0}, {0}, {0}]
    assert elimination_order(star, [4, 1, 1, 1], 4)[0][0] == 1


def test_unrolling_follows_each_point_back_to_its_choices():
    problem = random_problem([(0, 1), (1, 2), (1, 3)], 4, 2, seed=0)
    schedule = make_schedule(problem, 10**6)
    points, turned = np.arange(3), np.array([1, 2, 0])  # every step turns the points of its inputs
    traces = []
    depth = {schedule.root: 0}
    for step in schedule.steps:
        node = [] if step.node is None else [10 * step.node + points]
        traces.append([turned for _ in step.inputs] + node)
    wanted = np.zeros((3, 4), np.int64)
    for step in reversed(schedule.steps):
        depth |= dict.fromkeys(step.inputs, depth[step.output] + 1)
        if step.node is not None:
            wanted[:, step.node] = 10 * step.node + (points + depth[step.output]) % 3
    assert (schedule.unroll(traces, 3, 4) == wanted).all()


def test_repeated_layers_share_their_costly_joins():
    few, many = (
        [join for join in joins(layered_problem(depth, 3)) if len(join.sizes) > 2]
        for depth in (4, 256)
    )
    assert 0 < len(many) == len(few)


def test_tables_stay_small_where_skips_and_a_hub_allow_it():
    problem = layered_problem(20, 4, hub=True)
    assert max(math.prod(join.shape) for join in joins(problem)) <= 4**3
    assert make_schedule(problem, 4**3).pinned == ()


@pytest.mark.parametrize("pairs", [COMPLETE, grid(5, 5)])
@pytest.mark.parametrize("max_table", [3, 9, 27])
def test_pins_keep_every_table_within_the_limit(pairs, max_table):
    problem = random_problem(pairs, 1 + max(max(p) for p in pairs), 3, seed=0)
    schedule = make_schedule(problem, max_table)
    assert schedule.pinned
    made = [join for join in joins(problem, max_table) if join.eliminates]
    assert all(math.prod(join.shape) <= max_table for join in made)


def test_the_busiest_node_is_pinned_first():
    wheel = [set(range(1, 9))] + [{0, 1 + i, 1 + (i - 2) % 8} for i in range(1, 9)]
    wheel = [{0, *(1 + (i + d) % 8 for d in (-1, 1))} for i in range(8)]
    hub_and_ring = [set(range(1, 9)), *wheel]
    assert elimination_order(hub_and_ring, [4] * 9, 4**2)[1] == [0]
