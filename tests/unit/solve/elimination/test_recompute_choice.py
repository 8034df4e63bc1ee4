from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Edge, Node, Problem
from shardwright.solve.elimination.recompute_choice import (
    HostChoice,
    KeepChoice,
    with_recompute_choice,
)
from tests.harness.generators import as_lists, problems, tables
from tests.harness.oracles import enumerate_problem, non_dominated


@st.composite
def both_ways(draw):
    """A problem with two costs of everything, its segments, and what may be kept or moved."""
    one = draw(problems(max_nodes=4, max_choices=2))
    pool = {}

    def other(table):
        if id(table) not in pool:
            pool[id(table)] = draw(tables(table.shape, forbidden=False))
        return pool[id(table)]

    segment = {}
    for i in range(len(one.nodes)):
        if (number := draw(st.sampled_from([None, 0, 0, 1]))) is not None:
            segment[i] = number
    nodes = [Node(n.name, *other(n.time)) if i in segment else n for i, n in enumerate(one.nodes)]
    edges = [Edge(e.tail, e.head, *other(e.time)) if e.head in segment else e for e in one.edges]
    keepable = [
        KeepChoice(f"op{i}", i, *draw(tables((one.nodes[i].num_choices, 2), forbidden=True)))
        for i in segment
        for _ in range(draw(st.integers(0, 2)))
    ]
    pairs = [(e.tail, e.head) for e in one.edges if e.head in segment]
    movable = [
        HostChoice(
            f"input of {b}", a, b, *draw(tables((one.nodes[a].num_choices, 2), forbidden=True))
        )
        for a, b in pairs[:2]
        if segment[b] != segment.get(a)
    ]
    return one, Problem(tuple(nodes), tuple(edges)), segment, keepable[:2], movable


def costs(first, second, segment, keepable, movable):
    """Costs of all plans.

    Every segment goes one way as a whole, every operator is kept or runs again, and every input
    of a recomputed segment waits on the device or on the host.
    """
    names = sorted(set(segment.values()))
    for ways in product((first, second), repeat=len(names)):
        way = dict(zip(names, ways, strict=True))
        edges = tuple(
            way.get(segment.get(e.head), first).edges[i] for i, e in enumerate(first.edges)
        )
        moved = [one for one in movable if way[segment[one.reader]] is second]
        both = product(product((0, 1), repeat=len(keepable)), product((0, 1), repeat=len(moved)))
        for kept, places in both:
            nodes = [way.get(segment.get(i), first).nodes[i] for i in range(len(first.nodes))]
            for choice, column in zip(keepable, kept, strict=True):
                if way[segment[choice.node]] is second:
                    old, at = nodes[choice.node], (slice(None), column)
                    sums = old.time + choice.time[at], old.memory + choice.memory[at]
                    nodes[choice.node] = Node(old.name, *sums)
            for choice, column in zip(moved, places, strict=True):
                old, at = nodes[choice.source], (slice(None), column)
                sums = old.time + choice.time[at], old.memory + choice.memory[at]
                nodes[choice.source] = Node(old.name, *sums)
            yield from enumerate_problem(*as_lists(Problem(tuple(nodes), edges)))


@given(both_ways())
def test_every_segment_takes_one_way_as_a_whole_and_keeps_operators_and_moves_inputs(case):
    _, _, segment, keepable, movable = case
    joined = with_recompute_choice(*case)
    found = exact_frontier(joined.problem).points
    assert {(p.time, p.memory) for p in found} == non_dominated(set(costs(*case)))
    assert (len(joined.keeps), len(joined.hosts)) == (len(keepable), len(movable))
    for point in found:
        for choice, node in zip(keepable, joined.keeps, strict=True):
            if point.choice[joined.switches[segment[choice.node]]]:
                k = point.choice[joined.twins[choice.node]]
                assert np.isfinite(choice.time[k, point.choice[node]])
        for choice, node in zip(movable, joined.hosts, strict=True):
            again = point.choice[joined.switches[segment[choice.reader]]]
            assert (point.choice[node] < 2) == again


def test_a_problem_without_pieces_is_left_alone():
    only = Problem((Node("a", [1.0, 2.0], [3, 1]),))
    assert with_recompute_choice(only, only, {}).problem is only
