"""Checkmate's program and its relaxation against enumeration, and plans as its schedules."""

from itertools import product

import numpy as np
import pytest

import shardwright as sw
from benchmarks.checkmate.page import body
from benchmarks.checkmate.paper_program import paper_program
from benchmarks.checkmate.plans import priced, with_last_end_once
from benchmarks.checkmate.relaxation import optimum
from benchmarks.checkmate.run import LAYERS, MACHINE, gpt2, searched
from benchmarks.checkmate.schedule import Schedule, schedule_of
from benchmarks.checkmate.training_graph import TrainingGraph


def random_graph(seed, forward=3, backward=2):
    """A few nodes in a chain with some reads more; the backward ones read forward ones."""
    rng, count = np.random.default_rng(seed), forward + backward
    reads = [()]
    for node in range(1, count):
        others = [i for i in range(node - 1) if rng.random() < 0.4]
        reads.append((*others, node - 1))
    draws = rng.integers(1, 9, (3, count)).tolist()
    names = tuple(map(str, range(count)))
    work = tuple(one // 3 for one in draws[2])
    return TrainingGraph(
        names, tuple(map(float, draws[0])), tuple(draws[1]), work, tuple(reads), forward
    )


def every_schedule(graph):
    """All schedules of a graph, by every set of runs."""
    count = len(graph)
    places = np.tril_indices(count, -1)
    for chosen in product((False, True), repeat=len(places[0])):
        runs = np.eye(count, dtype=bool)
        runs[places] = chosen
        found = schedule_of(graph, runs)
        if not found.error():
            yield found


@pytest.mark.parametrize("seed", range(6))
def test_programs_find_what_enumeration_finds(seed):
    graph = random_graph(seed)
    known = [(one.peak, one.seconds) for one in every_schedule(graph)]
    peaks = sorted({peak for peak, _ in known})
    cheapest = [min(s for p, s in known if p <= peak) for peak in peaks]
    decisive = [p for p, s, t in zip(peaks, cheapest, [np.inf, *cheapest], strict=False) if s < t]
    for limit in (peaks[0] - 1, *decisive):
        least = min((s for p, s in known if p <= limit), default=np.inf)
        assert paper_program(graph, limit).solved(60).bound == pytest.approx(least)
        found = optimum(graph, limit, 60)
        assert found.bound <= least * (1 + 1e-9)
        if found.schedule is not None:
            assert not found.schedule.error() and found.schedule.peak <= limit
            assert found.schedule.seconds == pytest.approx(least)
            assert found.bound == pytest.approx(least)


def test_the_relaxation_is_exact_where_only_the_backward_pass_decides():
    """Of one node a stage it adds cuts until the schedule fits."""
    graph = TrainingGraph(
        names=tuple("abcdCBA"),
        seconds=(3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        bytes=(4, 4, 4, 1, 1, 1, 1),
        workspace=(0, 0, 0, 0, 0, 5, 0),
        reads=((), (0,), (1,), (2,), (2, 3), (1, 4), (0, 5)),
        forward=4,
    )
    loose, tight = optimum(graph, 15, 60), optimum(graph, 13, 60)
    assert (loose.bound, loose.schedule.peak) == (10.0, 15)
    assert tight.schedule.peak <= 13 and tight.bound == pytest.approx(tight.schedule.seconds)
    assert tight.rounds > 1 and tight.bound > 10.0
    assert optimum(graph, 5, 60).bound == np.inf


def test_broken_schedules_are_named():
    graph = random_graph(0)
    count = len(graph)
    whole = schedule_of(graph, np.eye(count, dtype=bool))
    assert whole.error() == "" and whole.seconds == graph.least_seconds
    nothing = Schedule(graph, whole.runs, np.zeros_like(whole.held))
    assert "without what it reads" in nothing.error()
    assert "without its node" in Schedule(graph, np.zeros_like(whole.runs), whole.held).error()
    early = whole.held.copy()
    early[1, 2] = True
    assert "before its stage" in Schedule(graph, whole.runs, early).error()
    late = np.zeros_like(whole.held)
    late[count - 1, 0] = True
    assert "was not there" in Schedule(graph, whole.runs, late).error()


@pytest.fixture(scope="module")
def step():
    graph = gpt2(2048)
    return graph, priced(graph, sw.Machine.preset(MACHINE))


@pytest.mark.hf
def test_nodes_are_what_autograd_saves(step):
    """Their bytes are those of all saved values at the end of the forward pass."""
    graph, nodes = step
    assert (len(nodes), nodes.forward) == (2 * nodes.forward, 11 * LAYERS + 3)
    assert all(read < node for node, reads in enumerate(nodes.reads) for read in reads)
    root = {}
    for op in graph.ops:
        for name in op.outputs:
            source = graph.tensor[name].alias_of
            root[name] = root.get(source, source) if source else name
    made = {name for op in graph.ops for name in op.outputs}
    saved = {root[name] for op in graph.ops for name in op.saves if name in made}
    size = sum(graph.tensor[name].bytes for name in saved & made)
    size += sum(op.extra_saved for op in graph.ops)
    held = schedule_of(nodes, np.eye(len(nodes), dtype=bool)).held[nodes.forward]
    kept = sum(nodes.bytes[i] for i in np.flatnonzero(held))
    loss = graph.tensor[graph.outputs[0]].bytes
    assert kept == size + loss


@pytest.mark.hf
def test_plans_are_schedules_with_valid_bounds(step):
    graph, nodes = step
    found = searched(graph, nodes)
    kept = 0
    for one in found:
        seconds = sum(op.seconds for op in one.plan.ops)
        assert not one.schedule.error()
        again = any(op.runs_again for op in one.plan.ops)
        assert one.schedule.seconds <= seconds * (1 + 1e-9)
        assert again or one.schedule.seconds == pytest.approx(seconds, rel=1e-9)
        ends = list(with_last_end_once(nodes, one.schedule))
        assert len(ends) == (one.schedule.runs.sum() - len(nodes))
        assert not any(end.error() for end in ends[:3])
        assert not ends or ends[-1].seconds == pytest.approx(nodes.least_seconds)
        kept += again and any(op.kept for op in one.plan.ops)
    assert kept
    for one in (found[0], found[len(found) // 2], found[-1]):
        best = optimum(nodes, one.schedule.peak, 60)
        assert one.least_seconds <= best.bound * (1 + 1e-9)
        assert best.bound <= one.schedule.seconds * (1 + 1e-9)


def test_the_page_shows_how_far_above_the_optimum_plans_are():
    row = {"limit": 2**30, "ours": {"seconds": 0.1001}, "bound": 0.1, "optimal": True}
    row["end_once"] = 0.10005
    row["planned"] = {"printed_bound": 0.09, "bound_within_its_bytes": 0.1}
    row["paper"] = {"minutes": 2, "bound": 0.098, "proven": False}
    model = {"operators": 20, "nodes": 12, "forward_nodes": 6, "plans": 5, "rows": [row]}
    shown = body({"planned for": "1xH100", "models": {"tiny": model}}).splitlines()
    assert "| tiny | 1024 | 100.10 | 100.00 | 0.10 % | 0.05 % | 90.00 | 100.00 |" in shown
    assert shown[-1].startswith("* tiny: 20 operators are 12 nodes, 6 of them of the forward pass;")
    assert "1 of 1 printed bounds are not above Checkmate's optimum. Of" in shown[-1]
    assert "solves 0 of 1 in 2 min each; its bounds are up to 2.0 % below" in shown[-1]
    row["planned"]["printed_bound"] = 0.1001
    shown = body({"planned for": "1xH100", "models": {"tiny": model}})
    assert (
        "0 of 1 printed bounds are not above Checkmate's optimum (the others by up to 0.100 %)"
        in shown
    )
