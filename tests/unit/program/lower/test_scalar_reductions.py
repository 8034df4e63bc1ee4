"""Sums of single numbers at the beginning and at the end of a program."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Redistribute, writes
from shardwright.program.lower.rank_program import lower, verify
from shardwright.program.lower.scalar_reductions import early_sums, late_sums
from shardwright.rules.analysis import analyze
from shardwright.rules.deferrable_scalars import deferrable_scalars
from shardwright.rules.placements import parse_tiling
from shardwright.tracing.capture import capture_call

MESH = Mesh.parse("dp=2")


class Classified(nn.Module):
    """A weighted mean, scaled twice; `again` scales it with itself too, `trained` with a weight."""

    def __init__(self, again=False, trained=False):
        super().__init__()
        self.layer = nn.Linear(8, 5)
        self.again, self.trained = again, trained
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, classes):
        loss = 0.5 * (F.cross_entropy(self.layer(x), classes) * 3.0)
        if self.trained:
            return loss / self.temperature.exp()
        return loss * loss if self.again else loss


def program(**options):
    """The first rank's program, in which every sum comes as soon as it can."""
    batch = {"x": torch.ones(6, 8), "classes": torch.zeros(6, dtype=torch.long)}
    graph = capture_call(Classified(**options), (), batch).graph
    analysis = analyze(graph)
    tilings = {}
    for op in graph.ops:
        rule = analysis.rules[op.name]
        rows = "n" if op.kind == "cross_entropy_loss" else "b0" if op.kind == "linear" else "d0"
        rows = rows if rows in {factor.name for factor in rule.factors} else "-"
        tilings[op.name] = parse_tiling(rule, (rows,))
    storage = {
        leaf.name: Layout.parse("dp:R", MESH) for leaf in graph.leaves_of(LeafKind.PARAMETER)
    }
    return graph, lower(graph, analysis, Decisions(MESH, tilings, storage), 0)


def order(program):
    return [name for one in program.instructions for name in writes(one)]


def sums(program):
    """Names of the values that are numbers and summed in the forward pass."""
    return [
        one.value
        for one in program.instructions
        if isinstance(one, Redistribute) and one.before == () and one.forward
    ]


def test_a_number_that_depends_on_the_batch_alone_is_summed_first():
    graph, before = program()
    after = early_sums(before, graph)
    verify(after)
    assert sorted(order(after)) == sorted(order(before))
    assert sums(before) == ["cross_entropy_loss", "sum"]
    (at,) = (
        i
        for i, one in enumerate(after.instructions)
        if isinstance(one, Redistribute) and one.value == "sum"
    )
    assert order(before).index("linear") < order(before).index("sum")
    assert at < order(after).index("linear")
    moved = {op.name for op in graph.ops if order(after).index(op.name) < at}
    assert moved == {"ne", "to_copy", "sum"}


def test_the_loss_is_summed_behind_everything_that_scales_it():
    graph, before = program()
    after = late_sums(before, graph)
    verify(after)
    (output,) = after.outputs
    last = after.instructions[-1]
    assert isinstance(last, Redistribute) and last.result == output
    assert last.value == before.outputs[0]
    assert sums(after) == ["sum", last.value]
    assert late_sums(after, graph) == after


def test_a_loss_that_is_read_twice_is_summed_where_it_was():
    graph, before = program(again=True)
    after = late_sums(before, graph)
    verify(after)
    assert after.outputs == before.outputs
    assert order(after) == order(before)


def test_a_scale_that_is_trained_gets_the_whole_sum():
    graph, before = program(trained=True)
    assert late_sums(before, graph) == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"cross_entropy_loss", "sum"}),
        ({"again": True}, {"sum"}),
        ({"trained": True}, {"sum"}),
    ],
)
def test_graphs_tell_the_sums_that_programs_move(options, expected):
    graph, before = program(**options)
    told = {value for value, _ in deferrable_scalars(graph)}
    assert told.intersection(sums(before)) == expected
    after = late_sums(early_sums(before, graph), graph)
    assert set(waited_for(before)) - set(waited_for(after)) == expected


def waited_for(program):
    """Numbers that are summed between the first operator of the layer and the last of all."""
    *inner, _ = program.instructions[order(program).index("linear") :]
    return [one.value for one in inner if isinstance(one, Redistribute) and one.before == ()]


def test_numbers_read_before_anything_else_runs_are_waited_for():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 5)

        def forward(self, x, weights):
            return (self.layer(x / weights.sum()) / weights.sum()).sum()

    batch = {"x": torch.ones(6, 8), "weights": torch.ones(6)}
    graph = capture_call(Scaled(), (), batch).graph
    first, second = [op for op in graph.ops if op.kind == "div"]
    told = {
        reader
        for value, reader in deferrable_scalars(graph)
        if value in first.operands + second.operands
    }
    assert told == {second.name}
