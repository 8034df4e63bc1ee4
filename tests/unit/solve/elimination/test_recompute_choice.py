from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Edge, Node, Problem
from shardwright.solve.elimination.recompute_choice import with_recompute_choice
from tests.harness.generators import as_lists, problems, tables
from tests.harness.oracles import enumerate_problem, non_dominated


@st.composite
def both_ways(draw):
    """A problem with two costs of everything, and the pieces that its nodes belong to."""
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
    return one, Problem(tuple(nodes), tuple(edges)), segment


@given(both_ways())
def test_every_piece_takes_one_way_as_a_whole(case):
    first, second, segment = case
    joined = with_recompute_choice(first, second, segment)
    found = {(p.time, p.memory) for p in exact_frontier(joined.problem).points}
    costs = set()
    names = sorted(set(segment.values()))
    for ways in product((first, second), repeat=len(names)):
        way = dict(zip(names, ways, strict=True))
        nodes = tuple(way.get(segment.get(i), first).nodes[i] for i in range(len(first.nodes)))
        edges = tuple(
            way.get(segment.get(e.head), first).edges[i] for i, e in enumerate(first.edges)
        )
        costs |= enumerate_problem(*as_lists(Problem(nodes, edges)))
    assert found == non_dominated(costs)


def test_a_problem_without_pieces_is_left_alone():
    only = Problem((Node("a", [1.0, 2.0], [3, 1]),))
    assert with_recompute_choice(only, only, {}).problem is only
