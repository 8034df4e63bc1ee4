"""Slow, obvious reference implementations. Never import the code under test's helpers."""

from itertools import pairwise, product

INF = float("inf")


def non_dominated(costs):
    """The (time, memory) pairs that no other pair beats; forbidden ones are no pairs."""
    allowed = {c for c in costs if c[0] < INF}
    return {
        c for c in allowed if not any(d != c and d[0] <= c[0] and d[1] <= c[1] for d in allowed)
    }


def enumerate_problem(nodes, edges):
    """Frontier of a search problem as a set of (time, memory); exponential on purpose.

    `nodes` is a list of (times, memories), `edges` of (tail, head, times, memories), where an
    edge's times and memories are lists of rows, one row for each choice of the tail.
    """
    costs = set()
    for pick in product(*(range(len(times)) for times, _ in nodes)):
        time = memory = 0
        for (times, memories), k in zip(nodes, pick, strict=True):
            time, memory = time + times[k], memory + memories[k]
        for tail, head, times, memories in edges:
            time = time + times[pick[tail]][pick[head]]
            memory = memory + memories[pick[tail]][pick[head]]
        costs.add((time, memory))
    return non_dominated(costs)


def least_time(frontier, limit):
    """Least time on a frontier, a set of (time, memory), within a memory limit."""
    return min((time for time, memory in frontier if memory <= limit), default=INF)


def lower_hull(frontier):
    """The points of a frontier below which no line between two others passes, ends included."""
    points = sorted(frontier)
    return {
        p
        for i, p in enumerate(points)
        if not any(_is_above(p, a, b) for a in points[:i] for b in points[i + 1 :])
    }


def _is_above(p, a, b):
    """Whether `p` is strictly above the line from `a` to `b`, the slower one."""
    return (b[0] - a[0]) * (p[1] - a[1]) > (b[1] - a[1]) * (p[0] - a[0])


def is_frontier(points):
    """Whether (time, memory, ...) tuples come fastest first with memory strictly falling."""
    return all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(points))
