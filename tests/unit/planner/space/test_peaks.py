"""Transient memory of whole assignments, against the sums of two assignments."""

import numpy as np
import pytest

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.space.peaks import Peaks
from shardwright.planner.space_factory import SpaceFactory
from shardwright.solve.frontier.fast import Effort, fast_frontier
from tests.harness.layered_graphs import residual_layers
from tests.zoo import ZOO

MACHINE = preset("4xH100")


@pytest.fixture(scope="module", params=["residual layers", "mixtral"])
def peaks(request):
    if request.param == "mixtral":
        module, batch = ZOO["mixtral"]()
        graph = sw.capture(module, (), batch)
    else:
        graph = residual_layers(7)
    space, _ = SpaceFactory(graph, recompute=True).space(
        MACHINE, Mesh.parse("dp=2 tp=2"), "adamw", 1, host=True
    )
    return Peaks(space)


def points(space):
    effort = Effort(max_weights=16, max_points=16)
    return fast_frontier(space.folded, effort, solver=space.solver, prices=space.prices).points


def switched(peaks, choice, switch):
    """The assignment in which one recomputed segment is kept instead, all else equal."""
    nodes, twins, switches = peaks._recomputable
    kept = list(choice)
    for node, twin in zip(nodes[switches == switch], twins[switches == switch], strict=True):
        kept[node], kept[twin] = choice[twin], peaks._sizes[twin] - 1
    for node, of in zip(*peaks._waiting, strict=True):
        if of == switch:
            kept[node] = 2  # the input waits neither here nor on the host
    kept[switch] = 0
    return tuple(kept)


def test_a_recomputed_segment_adds_what_it_would_keep_less_what_it_keeps(peaks):
    """The parameters, gradients and optimizer state of the segment were counted twice."""
    space, tried = peaks.space, 0
    *_, switches = peaks._recomputable
    for point in points(space):
        again = [s for s in np.unique(switches).tolist() if point.choice[s] == 1]
        more = [
            space.prices.point(switched(peaks, point.choice, s)).memory - point.memory
            for s in again
        ]
        tried += bool(again)
        workspaces = np.concatenate(space.workspaces)[peaks.first + np.array(point.choice)].max()
        expected = workspaces + max([0, *more])
        assert peaks.at(np.array([point.choice])).tolist() == [expected]
        assert peaks.of_one_choice(point.choice) <= expected
    assert tried > 2


def test_bytes_belong_to_the_owner_of_a_node_and_of_the_head_of_an_edge(peaks):
    """By hand, for two owners of some of the nodes to which edges have bytes."""
    problem, folded = peaks.space.problem, peaks.space.folded
    tables, ends = folded.node_tables().tolist(), [x.tolist() for x in folded.edge_ends()]
    edges = [e for e in zip(*ends, strict=True) if problem.edges[e[0]].memory.any()]
    heads = sorted({head for _, _, head in edges})
    owner = {node: number % 2 for number, node in enumerate(heads[::2])}
    choices = np.array([point.choice for point in points(peaks.space)])
    expected = np.zeros((2, len(choices)), int)
    for at, choice in enumerate(choices):
        for node, number in owner.items():
            expected[number, at] += problem.nodes[tables[node]].memory[choice[node]]
        for edge, tail, head in edges:
            if head in owner:
                memory = problem.edges[edge].memory[choice[tail], choice[head]]
                expected[owner[head], at] += memory
    assert peaks._kept_bytes(choices, owner).tolist() == expected.tolist() and expected.any()


def test_a_space_below_a_threshold_has_the_same_prices_and_only_smaller_choices(peaks):
    most = 1 + min(peaks.of_one_choice(point.choice) for point in points(peaks.space))
    narrow = peaks.below(most)
    assert narrow is not None
    found = points(narrow)
    assert found
    for point in found:
        assert peaks.of_one_choice(point.choice) < most
        assert peaks.space.prices.point(point.choice) == point
    assert peaks.below(0) is None
