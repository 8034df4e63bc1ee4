"""Slow, obvious reference implementations. Never import the code under test's helpers."""

from itertools import combinations, pairwise, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

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


def integer_program(nodes, edges, limit):
    """Least time of a search problem within a memory limit, by HiGHS; infinite if nothing fits.

    One binary for each choice of a node and one number for each pair of choices of an edge; the
    problem is given as for `enumerate_problem`.
    """
    first = np.cumsum([0, *(len(times) for times, _ in nodes)])
    time = [t for times, _ in nodes for t in times]
    memory = [m for _, memories in nodes for m in memories]
    rows, columns, values, right = [], [], [], []

    def equation(terms, value):
        rows.extend([len(right)] * len(terms))
        columns.extend(column for column, _ in terms)
        values.extend(factor for _, factor in terms)
        right.append(value)

    for i in range(len(nodes)):  # each node takes one choice
        equation([(k, 1) for k in range(first[i], first[i + 1])], 1)
    for tail, head, times, memories in edges:  # each edge takes the pair that its ends take
        pairs = len(time) + np.arange(len(times) * len(times[0])).reshape(len(times), -1)
        time += [t for row in times for t in row]
        memory += [m for row in memories for m in row]
        for end, side in ((tail, pairs), (head, pairs.T)):
            for k, some in enumerate(side.tolist()):
                equation([*((pair, 1) for pair in some), (first[end] + k, -1)], 0)
    time, memory = np.array(time), np.array(memory, float)
    allowed = np.isfinite(time)
    scale = max(memory.max(), 1.0)
    found = milp(
        np.where(allowed, time, 0.0) / time[allowed].max(),
        constraints=[
            LinearConstraint(
                coo_array((values, (rows, columns)), shape=(len(right), len(time))).tocsr(),
                right,
                right,
            ),
            LinearConstraint(memory[None, :] / scale, -np.inf, limit / scale),
        ],
        integrality=np.arange(len(time)) < first[-1],
        bounds=Bounds(0, allowed.astype(float)),
        options={"mip_rel_gap": 1e-6},
    )
    return INF if found.fun is None else found.fun * time[allowed].max()


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


def enumerate_cuts(graph, stages, work, slack):
    """The least busiest stage of any cuts, and the fewest bytes of those at most `slack` busier.

    Each stage must be the first to read some parameter. None if there are no such cuts.
    """
    n = len(graph.ops)
    read = [set(op.operands) for op in graph.ops]
    parameters = {leaf.name for leaf in graph.leaves if leaf.kind.value == "parameter"}
    found = []
    for cuts in combinations(range(1, n), stages - 1):
        parts = [range(a, b) for a, b in pairwise((0, *cuts, n))]
        homes = [{p for i in part for p in read[i] & parameters} for part in parts]
        for k in reversed(range(stages)):
            homes[k] -= set().union(*homes[:k])
        if not all(homes):
            continue
        size = 0
        for cut in cuts:
            made = {graph.ops[i].outputs[0] for i in range(cut)}
            made |= {p for i in range(cut) for p in read[i] & parameters}
            later = {*graph.outputs, *(name for i in range(cut, n) for name in read[i])}
            size += sum(graph.tensor[name].bytes for name in made & later)
        found.append((max(sum(work[i] for i in part) for part in parts), size))
    if not found:
        return None
    limit = int(min(load for load, _ in found) * (1 + slack))
    return {"limit": limit, "bytes": min(size for load, size in found if load <= limit)}


def train_asynchronously(weights, how, batches, lr, gamma, discount_steps=0):
    """Losses of N stages `h ← tanh(h W)` under momentum, from a history of every stage's weights.

    Of mini-batch m, stage k runs the forward pass after m - (N - k - 1) updates of its own, at
    least none, and the backward pass after m. `how` says which weights the passes see. Before
    update n of `discount_steps` it trains with lr / (N - k)^(1 - n / discount_steps).
    """

    def rate(stage, made):
        return lr / (stages - stage) ** (1 - made / discount_steps) if made < discount_steps else lr

    stages = len(weights)
    history = [[(w, w * 0)] for w in weights]  # per stage and number of updates: weights, momentum
    losses = []
    for m, (x, y) in enumerate(batches):
        outputs, seen = [x], []
        for k in range(stages):
            made = max(0, m - (stages - k - 1))
            w, v = history[k][made]
            ahead = {"spectrain": k // 2 + stages - k - 1, "pipeoptim": stages - k - 1}.get(how, 0)
            if how == "pipeoptim-decay":
                ahead = sum(gamma**i for i in range(1, stages - k))
            seen.append(w - ahead * rate(k, made) * v)
            outputs.append((outputs[-1] @ seen[-1]).tanh())
        error = outputs[-1] - y
        losses.append((error * error).mean())
        gradient = 2 * error / error.numel()
        for k in reversed(range(stages)):
            w, v = history[k][m]
            due = {"stash": seen[k], "spectrain": w - (k // 2) * rate(k, m) * v}.get(how, w)
            gradient = gradient * (1 - outputs[k + 1] ** 2)
            ours, gradient = outputs[k].T @ gradient, gradient @ due.T
            v = gamma * v + ours
            history[k].append((w - rate(k, m) * v, v))
    return losses, [h[-1][0] for h in history]
