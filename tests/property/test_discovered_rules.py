"""Where a rule is written, an experiment finds the same, but for what it cannot try."""

from dataclasses import replace

import pytest

from shardwright.ir.graph import Graph
from shardwright.rules.analysis import analyze
from shardwright.rules.rule import FactorKind, Split
from shardwright.tracing.discovery.experiment import discover
from tests.harness.operator_calls import CALLS

# The width of attention's values and of what experts return may be split, counts may be added up,
# and windows that do not overlap may be apart: nobody gains by it.
LEFT_OUT = ("scaled_dot_product_attention", "experts", "histc", "conv_transpose2d")
# Sizes or numbers of groups in their arguments, which tiles would need others of; or a kernel that
# takes no tiles as small as an experiment's, or dies of tiles that do not fit. Local statistics of
# parts are no part of those of the whole, and meant to be.
NOT_TRIED = (
    *("full", "zeros", "ones", "new_zeros", "new_ones", "new_full", "expand", "repeat"),
    *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "pixel_shuffle", "group_norm"),
    # It drops a dimension of which a tile has one element.
    "squeeze",
    *("_grouped_mm", "lstm", "gru", "local_batch_norm"),
    # Their tiles have to know which they are, and no call of the operator itself says so.
    *("embedding", "embedding_bags", "cross_entropy_loss", "linear_cross_entropy", "experts"),
    # It raises for the masks that an experiment draws.
    "all_true",
    # Devices tell each other more than their results.
    *("amax", "amin", "max", "min", "logsumexp", "prod"),
)
MADE_UP = ("dropout", "uniform", "empty", "empty_like", "new_empty")
ONCE = list({one.op.kind: one for one in reversed(CALLS) if one.op.kind not in MADE_UP}.values())


@pytest.mark.parametrize("one", ONCE, ids=lambda one: one.name)
def test_what_is_found_is_what_is_written(one):
    text = discover(one.op, one.graph)
    found = _splits(_carrying(one.graph, text)) if text else set()
    written = _splits(one.graph)
    if one.op.kind not in LEFT_OUT:
        assert found <= written, text
    if one.op.kind not in NOT_TRIED:
        assert {split for split in written if _tried(*split)} <= found, text


def _tried(operands, results):
    """Not a part of a dimension, nor operands that come as partial sums, as a bias may."""
    return "Partial" not in operands and "atom=1" not in operands + results


def _carrying(graph, text):
    """The graph with an operator that no rule is written for, which carries `text`."""
    op = replace(graph.ops[0], target=f"nobody.{graph.ops[0].kind}.default", rule=text)
    return Graph(graph.leaves, (op,), graph.outputs, graph.values)


def _splits(graph):
    """Placements of operands and results under each split."""
    rule = analyze(graph).rules["y"]
    axis_placements = [
        rule.axis_placements(Split(f.name)) for f in rule.factors if f.kind is FactorKind.PARALLEL
    ]
    return {(str(p.operands), str(p.results)) for p in axis_placements}
