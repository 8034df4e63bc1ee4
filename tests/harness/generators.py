"""Hypothesis generators for the core types, with whole-number costs, whose sums are exact."""

import numpy as np
from hypothesis import strategies as st

from shardwright.solve.elimination.problem import Edge, Node, Problem

SHAPES = {  # pairs of nodes that are joined, for some number of nodes
    "lone": lambda n: [],
    "chain": lambda n: [(i, i + 1) for i in range(n - 1)],
    "tree": lambda n: [((i - 1) // 2, i) for i in range(1, n)],
    "star": lambda n: [(0, i) for i in range(1, n)],
    "ring": lambda n: [(i, (i + 1) % n) for i in range(n)] if n > 2 else [],
    "skips": lambda n: [(i, j) for i in range(n) for j in (i + 1, i + 3) if j < n],
    "diamond": lambda n: [(0, i) for i in range(1, n - 1)] + [(i, n - 1) for i in range(1, n - 1)],
    "complete": lambda n: [(i, j) for i in range(n) for j in range(i)],  # K4 and K5: irreducible
}


def tables(shape, forbidden):
    """(time, memory) of one shape; few values, so that ties abound."""
    time = st.sampled_from([0, 1, 2, 3, 5, 8, float("inf")] if forbidden else [0, 1, 2, 3, 5, 8])
    size = int(np.prod(shape))
    rows = st.tuples(
        st.lists(time, min_size=size, max_size=size),
        st.lists(st.integers(0, 9), min_size=size, max_size=size),
    )
    return rows.map(
        lambda r: (
            np.array(r[0], np.float64).reshape(shape),
            np.array(r[1], np.int64).reshape(shape),
        )
    )


@st.composite
def problems(draw, shapes=tuple(SHAPES), max_nodes=5, max_choices=3, forbidden=True):
    """Small problems: multi-edges, edges both ways, cut graphs, shared tables, forbidden pairs."""
    num = draw(st.integers(1, max_nodes))
    sizes = draw(st.lists(st.integers(1, max_choices), min_size=num, max_size=num))
    forbidden = forbidden and draw(st.booleans())
    pairs = SHAPES[draw(st.sampled_from(shapes))](num)
    if pairs:
        pairs += draw(st.lists(st.sampled_from(pairs), max_size=2))  # parallel edges
        cut = draw(st.integers(0, 9))  # sometimes cuts the graph in two
        pairs = [pair for i, pair in enumerate(pairs) if i != cut]
    flips = draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    pairs = [pair[::-1] if flip else pair for pair, flip in zip(pairs, flips, strict=True)]
    pool = {}  # equal shapes share a table half of the time

    def table(shape):
        if shape not in pool or draw(st.booleans()):
            pool[shape] = draw(tables(shape, forbidden))
        return pool[shape]

    nodes = tuple(Node(f"n{i}", *table((k,))) for i, k in enumerate(sizes))
    edges = tuple(Edge(t, h, *table((sizes[t], sizes[h]))) for t, h in pairs)
    return Problem(nodes, edges)


def as_lists(problem):
    """A problem as plain lists, for the oracles."""
    nodes = [(node.time.tolist(), node.memory.tolist()) for node in problem.nodes]
    edges = [(e.tail, e.head, e.time.tolist(), e.memory.tolist()) for e in problem.edges]
    return nodes, edges


def random_problem(pairs, num_nodes, num_choices, seed, most=50):
    """A problem too large for hypothesis, with whole-number costs."""
    rng = np.random.default_rng(seed)

    def table(*shape):
        time = rng.integers(0, most, shape).astype(np.float64)
        return time, rng.integers(0, most, shape)

    nodes = tuple(Node(f"n{i}", *table(num_choices)) for i in range(num_nodes))
    edges = tuple(Edge(t, h, *table(num_choices, num_choices)) for t, h in pairs)
    return Problem(nodes, edges)


def layered_problem(num_layers, num_choices, *, hub=False, seed=0, shared=True):
    """Layers of eight nodes with two skips each, like a transformer's; equal layers share tables.

    Costs are real numbers: fast choices need more memory.
    """
    rng = np.random.default_rng(seed)

    def node_costs():
        ways = 1 + rng.permutation(num_choices)
        time = 1e-3 * (1 + rng.random(num_choices)) / ways
        return time, np.int64(1e8 * ways * (1 + rng.random(num_choices)))

    def edge_costs():
        time = 3e-4 * rng.random((num_choices, num_choices))
        np.fill_diagonal(time, 0)
        return time, np.int64(1e7 * rng.random((num_choices, num_choices)))

    skips = [(0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (3, 7), (7, 8)]
    own = [node_costs() for _ in range(8)]
    between = [edge_costs() for _ in skips]
    nodes, edges = [], []
    for layer in range(num_layers):
        if not shared:
            own = [node_costs() for _ in range(8)]
        nodes += [Node(f"layers.{layer}.{i}", *costs) for i, costs in enumerate(own)]
        edges += [
            Edge(8 * layer + a, 8 * layer + b, *costs)
            for (a, b), costs in zip(skips, between, strict=True)
            if 8 * layer + b < 8 * num_layers
        ]
    if hub:
        costs = edge_costs()
        edges += [Edge(len(nodes), 8 * layer + 1, *costs) for layer in range(num_layers)]
        nodes.append(Node("mask", *node_costs()))
    return Problem(tuple(nodes), tuple(edges))
