"""Transient memory of whole assignments, against the sums of two assignments."""

import re

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
    """The assignment in which one recomputed segment, and all copies that it reads, are kept."""
    stored = dict(enumerate(peaks.space.stored, peaks.space.first_parameter))
    nodes, twins, switches = peaks._recomputable
    kept = list(choice)
    for node, twin in zip(nodes[switches == switch], twins[switches == switch], strict=True):
        kept[node], kept[twin] = choice[twin], peaks._sizes[twin] - 1
        if (own := stored.get(int(peaks.problem_node[node]))) is not None:
            kept[node] = own.find(own.codes[kept[node]], regathered=False)
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
        whole, in_order = np.array([point.choice]), Peaks(space, in_order=True)
        assert peaks.at(whole).tolist() == [expected]
        assert peaks.of_one_choice(point.choice) <= expected
        assert in_order.least <= in_order.at(whole)[0] <= expected
    assert tried > 2


def test_bytes_of_equal_assignments_are_computed_once(peaks, monkeypatch):
    choices = [point.choice for point in points(peaks.space)]
    every, computed = peaks.at(np.array(choices)).tolist(), []
    plain = Peaks.at
    monkeypatch.setattr(
        Peaks, "at", lambda self, rows: computed.append(len(rows)) or plain(self, rows)
    )
    again = Peaks(peaks.space)
    again.known[choices[0]] = every[0]  # as from another process
    assert again.of(choices) == again.of(choices[:1]) + again.of(choices)[1:] == every
    assert computed == [len(set(choices)) - 1]


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
    assert peaks._kept_bytes(choices, owner, 2).tolist() == expected.tolist() and expected.any()


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


def layer_of(peaks):
    """The layer of every node of whole assignments of `residual_layers`; -1 if it is in none."""
    folded, like = peaks.space.folded, peaks.problem_node.tolist()
    names = [folded.problem.nodes[node].name for node in like]
    layers = [int(re.findall(r"layers\.(-?\d+)", f"layers.-1 {name}")[-1]) for name in names]
    for number in range(len(folded.runs)):
        for copy, row in enumerate(folded.positions(number).tolist()):
            for node in row:
                layers[node] = copy + 1
    return layers


def recomputing(peaks, layers):
    """A whole assignment that recomputes these layers of `residual_layers`, on one device."""
    space, place = peaks.space, layer_of(peaks)
    ops, storage = dict.fromkeys(space.op_nodes, 0), {leaf.name: 0 for leaf in space.parameters}
    choice = list(space.folded.expand(space.assignment(ops, storage)))
    for node, twin, switch in zip(*(x.tolist() for x in peaks._recomputable), strict=True):
        if place[node] in layers:
            choice[node], choice[twin], choice[switch] = peaks._sizes[node] - 1, 0, 1
    return tuple(choice)


def expected_peak(peaks, layers):
    """Transient bytes while each layer runs backward, from tables of a space that is not folded."""
    problem, place = peaks.space.problem, layer_of(peaks)
    again, kept = recomputing(peaks, layers), recomputing(peaks, ())
    stored = {leaf.name for leaf in peaks.space.parameters}
    twins = peaks.space.recompute_choice.twins
    inside = {*twins, *twins.values()}

    def held(choice, its):
        own = {n for n in its if problem.nodes[n].name not in stored}
        edges = [e for e in problem.edges if e.head in own]
        nodes = sum(int(problem.nodes[n].memory[choice[n]]) for n in own)
        return nodes + sum(int(e.memory[choice[e.tail], choice[e.head]]) for e in edges)

    def workspace(its):
        return max(int(peaks.space.workspaces[n][again[n]]) for n in its)

    outside = set(range(len(place))) - inside
    if not layers:
        return workspace(range(len(place)))
    moments, later = [workspace(outside)], 0
    names = [node.name for node in problem.nodes]
    later += held(again, {i for i in outside if names[i] in ("last", "loss")})
    for layer in reversed(range(max(place) + 1)):
        its = {node for node in inside if place[node] == layer}
        mine = held(again, its)
        moments.append(held(kept, its) - mine + workspace(its) - later)
        later += mine
    return max(moments)


@pytest.fixture(scope="module")
def folded_and_whole():
    """The transient memory of seven layers on one device, folded and not."""
    graph, one, found = residual_layers(7), preset("1xH100"), []
    for together in (1, 100):  # as many copies are none that repeat
        factory = SpaceFactory(graph, recompute=True, together=together)
        found.append(Peaks(factory.space(one, Mesh.parse("dp=1"), "adamw", 1)[0], in_order=True))
    return found


@pytest.mark.parametrize("layers", [(), range(7), range(1, 7), range(6), (6,), (0, 2, 4), (3, 5)])
def test_the_peak_of_a_segment_is_without_what_segments_behind_it_kept(folded_and_whole, layers):
    """So the last layer takes no more if it is kept, in a folded space as in the whole one."""
    found = folded_and_whole
    folded, whole = found
    assert folded.space.folded.runs and not whole.space.folded.runs
    expected = expected_peak(whole, layers)
    for peaks in found:
        choice = recomputing(peaks, layers)
        assert np.isfinite(peaks.space.prices.point(choice).time)
        assert peaks.at(np.array([choice])).tolist() == [expected]


@pytest.mark.parametrize("peaks", ["residual layers"], indirect=True)
def test_a_space_keeps_its_last_layer_alone(peaks):
    narrow, place = peaks.with_largest_kept, layer_of(peaks)
    assert narrow is not None
    free, kept = points(peaks.space), points(narrow)
    node, _, switch = peaks._recomputable
    last = {
        s for n, s in zip(node.tolist(), switch.tolist(), strict=True) if place[n] == max(place)
    }
    assert any(point.choice[s] for point in free for s in last)
    assert not any(point.choice[s] for point in kept for s in last)
    assert any(point.choice[s] for point in kept for s in switch)
    assert kept[0].time == free[0].time and kept[-1].memory > free[-1].memory
