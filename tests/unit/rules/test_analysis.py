"""An analysis of a graph without its repeats, spread over all of it, is that of the whole graph."""

from dataclasses import replace

import pytest

from shardwright.ir.graph import LeafKind
from shardwright.planner.space.repeats import shorten
from shardwright.rules.analysis import analyze, expand_analysis
from shardwright.tracing.capture import capture_call
from tests.harness import models


def plain(rule):
    """A rule but for the ids of its atoms, which layers that are alike share."""
    return replace(rule, factors=tuple(replace(f, atom=-1) for f in rule.factors))


def partition(dims):
    """Which places of inputs and outputs are one dimension, whatever its id."""
    ids = {}
    return [tuple(tuple(ids.setdefault(a, len(ids)) for a in dim) for dim in d) for d in dims]


@pytest.mark.parametrize("name, layers", [("gpt2", 6), ("llama", 5)])
def test_spread_is_the_analysis_of_the_whole(name, layers):
    model, batch = getattr(models, name)(layers=layers)
    graph = capture_call(model, (), batch).graph
    short = shorten(graph)
    assert short.stands_for, "nothing repeats"
    whole, found = analyze(graph), expand_analysis(analyze(short.graph), graph, short.stands_for)
    assert dict(found.atoms) == dict(whole.atoms)
    assert {n: plain(r) for n, r in found.rules.items()} == {
        n: plain(r) for n, r in whole.rules.items()
    }
    ends = [leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)]
    assert partition(found.dims[n] for n in ends) == partition(whole.dims[n] for n in ends)
    assert (found.unknown, found.discovered) == (whole.unknown, whole.discovered)
    repeated = [found.rules[op.name] for op in graph.ops if op.name in short.stands_for]
    assert len({id(rule) for rule in repeated}) < len(repeated)
