"""Copies of runs, and the edges between them, as they are written out."""

import numpy as np

from shardwright.solve.elimination.problem import Edge, Node, Problem
from shardwright.solve.folding.folded import Folded, FoldedChain


def test_edges_of_runs_that_follow_each_other_join_neighbouring_copies():
    """0, three copies of 1, two copies of 2, and 3, where 0 is read by all copies of 2 too."""
    nodes = tuple(Node(f"n{i}", np.zeros(2), np.zeros(2, np.int64)) for i in range(4))
    pairs = (0, 1), (1, 2), (2, 3), (0, 2)
    edges = tuple(Edge(*pair, np.zeros((2, 2)), np.zeros((2, 2), np.int64)) for pair in pairs)
    first = FoldedChain((1,), entry=0, exit=1, count=3, after=frozenset({1}))
    second = FoldedChain((2,), entry=1, exit=2, count=2, after=frozenset({2}))
    folded = Folded(Problem(nodes, edges), (first, second))
    assert folded.node_tables().tolist() == [0, 1, 2, 3, 1, 1, 2]
    found = [tuple(map(int, one)) for one in zip(*folded.edge_ends(), strict=True)]
    # Earlier copies of 1 are 4 and 5, that of 2 is 6.
    of_first = [(0, 0, 4), (0, 4, 5), (0, 5, 1)]
    of_second = [(1, 1, 6), (1, 6, 2), (3, 0, 6), (3, 0, 2)]
    assert sorted(found) == sorted([*of_first, *of_second, (2, 2, 3)])
