import numpy as np
import pytest

from shardwright.solve.elimination.problem import Edge, Node, Problem, ProblemError, most, price

TIME, MEMORY = np.array([1.0, 2.0]), np.array([30, 20])
ZEROS = np.zeros((2, 2)), np.zeros((2, 2), np.int64)


def two_nodes(*edges):
    return Problem((Node("a", TIME, MEMORY), Node("b", TIME, MEMORY)), edges)


def test_a_price_adds_nodes_and_parallel_edges():
    time, memory = np.array([[0.0, 5.0], [7.0, 0.0]]), np.array([[0, 1], [2, 0]])
    problem = two_nodes(Edge(0, 1, time, memory), Edge(1, 0, time, memory))
    assert price(problem, (0, 1)) == (1 + 2 + 5 + 7, 30 + 20 + 1 + 2)


def test_the_most_of_all_prices_adds_the_largest_finite_entry_of_each_part():
    time, memory = np.array([[0.0, 5.0], [7.0, np.inf]]), np.array([[0, 1], [2, 0]])
    forbidden = Node("c", np.array([np.inf]), np.array([4]))
    problem = two_nodes(Edge(0, 1, time, memory), Edge(1, 0, time, memory))
    assert most(problem) == (2 + 2 + 7 + 7, 30 + 30 + 2 + 2)
    assert most(Problem((forbidden,))) == (0.0, 4)


def test_a_price_does_not_depend_on_the_order_of_nodes():
    times = [1e16, 1.0, 1.0, 3e-7]
    nodes = [Node(str(t), np.array([t]), np.array([0])) for t in times]
    prices = {price(Problem(tuple(order)), (0,) * 4) for order in (nodes, nodes[::-1])}
    assert prices == {(1e16 + 2, 0)}


def test_tables_are_kept_shared_and_become_read_only():
    time = np.array([3.0])
    nodes = (Node("a", time, np.array([1])), Node("b", time, np.array([2])))
    assert nodes[0].time is time and nodes[1].time is time
    with pytest.raises(ValueError, match="read-only"):
        time[0] = 4.0


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Problem(()), "at least one node"),
        (lambda: Node("q", TIME, MEMORY[:1]), r"node 'q' has time of shape \(2,\) and memory"),
        (lambda: Node("q", TIME, TIME), "memory of 'q' holds float64, it must hold whole bytes"),
        (lambda: Problem((Node("q", -TIME, MEMORY),)), r"'q' has a time of -1.0 s"),
        (lambda: Problem((Node("q", TIME * np.nan, MEMORY),)), r"'q' has a time of nan s"),
        (lambda: Problem((Node("q", TIME, -MEMORY),)), "'q' has -30 bytes of memory"),
        (lambda: Problem((Node("q", TIME, MEMORY * 2**50),)), "memory may reach 33776997205278720"),
        (lambda: two_nodes(Edge(0, 0, *ZEROS)), "edge 0 -> 0 is a loop"),
        (lambda: two_nodes(Edge(0, 2, *ZEROS)), "edge 0 -> 2 leaves the problem"),
        (lambda: Edge(0, 1, TIME, MEMORY), r"edge 0 -> 1 has time of shape \(2,\)"),
        (
            lambda: two_nodes(Edge(0, 1, ZEROS[0][:1], ZEROS[1][:1])),
            r"costs of shape \(1, 2\), but 'a' has 2 choices and 'b' has 2",
        ),
        (lambda: price(two_nodes(), (0,)), "1 choices given for 2 nodes"),
        (lambda: price(two_nodes(), (0, 2)), "choice 2 of node 'b', which has 2 choices"),
    ],
)
def test_errors_say_what_was_given_and_what_is_required(make, message):
    with pytest.raises(ProblemError, match=message):
        make()
