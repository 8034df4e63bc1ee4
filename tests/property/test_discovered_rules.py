"""Where a rule is written, what an experiment finds is never more than what is written."""

from dataclasses import replace

import pytest

from shardwright.capture.experiment import discover
from shardwright.ir.graph import Graph
from shardwright.rules.analysis import analyze
from shardwright.rules.rule import FactorKind, Split
from shardwright.rules.table import ELEMENTWISE
from tests.property.operators import CALLS

# The width of attention's values may be split, counts may be added up, and windows that do not
# overlap may be apart: nobody gains by it.
LEFT_OUT = ("scaled_dot_product_attention", "histc", "conv_transpose2d")
MADE_UP = ("dropout", "uniform", "empty", "empty_like")
ONCE = list({one.op.kind: one for one in CALLS if one.op.kind not in MADE_UP}.values())


@pytest.mark.parametrize("one", ONCE, ids=lambda one: one.name)
def test_what_is_found_is_also_written(one):
    text = discover(one.op, one.graph)
    found = _splits(_carrying(one.graph, text)) if text else set()
    written = _splits(one.graph)
    if one.op.kind not in LEFT_OUT:
        assert found <= written, text
    if one.op.kind in ELEMENTWISE and one.results[0].is_floating_point():
        assert found == written, text


def _carrying(graph, text):
    """The graph with an operator that no rule is written for, which carries `text`."""
    op = replace(graph.ops[0], target=f"nobody.{graph.ops[0].kind}.default", rule=text)
    return Graph(graph.leaves, (op,), graph.outputs, graph.values)


def _splits(graph):
    """Placements of operands and results under each split."""
    rule = analyze(graph).rules["y"]
    placed = [rule.placed(Split(f.name)) for f in rule.factors if f.kind is FactorKind.PARALLEL]
    return {(str(p.operands), str(p.results)) for p in placed}
