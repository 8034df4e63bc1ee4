from itertools import product

import numpy as np
from hypothesis import given, settings

from shardwright.solve.algebra.marginals import outsides
from shardwright.solve.algebra.minplus import forward, weighted
from shardwright.solve.elimination.schedule import make_schedule
from tests.harness.generators import problems
from tests.harness.oracles import INF

WEIGHTS = np.array([0.0, 0.5, 3.0])


def value(problem, pick, weight):
    at = [(node, (k,)) for node, k in zip(problem.nodes, pick, strict=True)]
    at += [(edge, (pick[edge.tail], pick[edge.head])) for edge in problem.edges]
    return sum(part.time[i] + weight * part.memory[i] for part, i in at)


@settings(max_examples=30)
@given(problems(max_nodes=4))
def test_inside_and_outside_are_the_best_of_all_assignments_with_an_entry(problem):
    schedule = make_schedule(problem, 10**6)
    objectives = weighted(WEIGHTS)
    tables = forward(schedule, objectives)
    outside = outsides(schedule, tables)
    every = list(product(*map(range, problem.sizes)))
    for row, weight in enumerate(WEIGHTS):
        values = {pick: value(problem, pick, weight) for pick in every}
        for factor, rest in zip(schedule.factors, outside, strict=True):
            total = tables[factor.table][row] + rest[row]
            best = np.full(total.shape, INF)
            for pick, found in values.items():
                at = tuple(pick[node] for node in factor.scope)
                best[at] = min(best[at], found)
            assert np.array_equal(total, best)
