"""Vocabularies split over devices: what one rank runs, and what it costs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.plan import Phase
from shardwright.machine.presets import preset
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Compute, Joint, Redistribute
from shardwright.program.lower.offset_ops import shared_attention
from shardwright.program.lower.rank_program import lower
from shardwright.program.lower.routing import Hop
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.rules.rule import JointSplit, Route, Split
from shardwright.tracing.capture import capture_call
from shardwright.tracing.own_operators.lookup import embedding_tile, local_index
from tests.harness.cost_queries import Asking
from tests.harness.drawn_tensors import f, i, u
from tests.harness.operator_calls import CALLS, GATED, call

CLASSES, WIDTH = 11, 4
MESH = Mesh.parse("tp=3")


class Tied(nn.Module):
    """A table that is looked up in and multiplied by, and a loss that ignores some labels."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)

    def forward(self, words, labels):
        logits = nn.functional.linear(self.table(words), self.table.weight).flatten(0, 1)
        return nn.functional.cross_entropy(
            logits, labels.flatten(), ignore_index=2, reduction="sum"
        )


GRAPH = capture_call(Tied(), (torch.zeros(2, 5, dtype=int), torch.ones(2, 5, dtype=int))).graph
ANALYSIS = analyze(GRAPH)
BY_CLASS = {"embedding": "v", "linear": "n", "cross_entropy_loss": "c", "view": "x2"}


def tilings(words):
    found = {}
    for op in GRAPH.ops:
        rule, word = ANALYSIS.rules[op.name], words.get(op.kind, "-")
        found[op.name] = parse_tiling(rule, (word if word in rule.factor else "-",))
    return found


def program(rank):
    table = {"table.weight": Layout.parse("tp:S(0)", MESH)}
    return lower(GRAPH, ANALYSIS, Decisions(MESH, tilings(BY_CLASS), table), rank)


@pytest.mark.parametrize("rank, tile", [(0, (0, 4, 11)), (1, (4, 4, 11)), (2, (8, 3, 11))])
def test_nothing_of_a_split_vocabulary_is_ever_gathered(rank, tile):
    instructions = program(rank).instructions
    (lookup,) = (i for i in instructions if isinstance(i, Compute) and "embedding" in i.op.target)
    assert lookup.op.args[2] == tile
    (loss,) = (i for i in instructions if isinstance(i, Joint))
    assert (loss.axes, loss.tile) == (("tp",), (tile,))
    moved = [i for i in instructions if isinstance(i, Redistribute)]
    assert not any(CLASSES in shape for i in moved for shape in (i.before, i.after))


def test_a_whole_vocabulary_takes_the_operators_there_are():
    whole = {"table.weight": Layout.parse("tp:R", MESH)}
    found = lower(GRAPH, ANALYSIS, Decisions(MESH, tilings({}), whole), 1).instructions
    kinds = [i.op.target for i in found if isinstance(i, Compute)]
    assert "aten.embedding.default" in kinds and "aten.cross_entropy_loss.default" in kinds


def loss_op():
    (op,) = (op for op in GRAPH.ops if op.kind == "cross_entropy_loss")
    return op


def test_a_loss_over_split_classes_pays_for_what_its_devices_tell_each_other():
    costs = Asking(GRAPH, ANALYSIS, preset("8xV100"), MESH)
    op, rule = loss_op(), ANALYSIS.rules[loss_op().name]
    options = costs.options(op)
    whole, split = (options.find(rule, parse_tiling(rule, (word,))) for word in ("-", "c"))
    assert costs.model.internal_transfers(op, whole) == []
    told = costs.model.internal_transfers(op, split, again=True)
    assert [t.collectives for t in told] == [("all_reduce tp",)] * 4
    assert [t.phase for t in told] == [Phase.FORWARD, Phase.RECOMPUTE] * 2
    assert {t.bytes for t in told} == {2 * 5 * 4}  # a number for each sample
    seconds = costs.model.operator(op).seconds
    again = costs.model.operator(op, [op.name]).seconds
    assert seconds[split] > told[0].seconds + told[2].seconds
    assert again[split] - seconds[split] > told[1].seconds + told[3].seconds


def test_what_a_loss_keeps_is_split_like_its_logits():
    """Log-probabilities are kept, many times the bytes of the loss itself."""
    costs = Asking(GRAPH, ANALYSIS, preset("8xV100"), MESH)
    op, rule = loss_op(), ANALYSIS.rules[loss_op().name]
    options, kept = costs.options(op), costs.model.operator(op).bytes
    whole, classes, samples = (
        options.find(rule, parse_tiling(rule, (word,))) for word in ("-", "c", "n.1")
    )
    assert kept[whole] >= 2 * 5 * CLASSES * 4
    assert kept[classes] == -(-kept[whole] * 4 // CLASSES)
    assert kept[samples] == -(-kept[whole] * 2 // 5)
    small = replace(op, extra_saved=1)  # less than the loss: goes with the loss, which is whole
    assert costs.model.operator(small).bytes.tolist() == [1] * len(options)


class Causal(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


@pytest.mark.parametrize(
    "split, rank, rows", [("l", 0, (0, 3, 5)), ("l", 1, (3, 2, 5)), ("h", 1, ())]
)
def test_causal_attention_knows_which_queries_it_has(split, rank, rows):
    graph = capture_call(Causal(), (torch.ones(1, 2, 5, 4, requires_grad=True),)).graph
    analysis, mesh = analyze(graph), Mesh.parse("cp=2")
    tilings = {
        op.name: parse_tiling(rule, (split if split in rule.factor else "-",))
        for op in graph.ops
        for rule in [analysis.rules[op.name]]
    }
    found = lower(graph, analysis, Decisions(mesh, tilings, {}), rank)
    (op,) = (one.op for one in found.instructions if is_attention(one))
    if rows:
        assert (op.target, op.args[3]) == ("shardwright.causal_rows.default", rows)
    else:
        assert op.kind == "scaled_dot_product_attention"


def is_attention(one):
    return isinstance(one, Compute) and len(one.op.operands) == 3


def test_places_within_a_tile_with_gaps():
    """Of the 2 x 6 rows those of the last two thirds of each half: 2..5 and 8..11."""
    at, inside = local_index(torch.arange(-1, 13), (0, 2, 2, 2, 4, 6))
    held = [2, 3, 4, 5, 8, 9, 10, 11]
    assert (torch.arange(-1, 13)[inside]).tolist() == held
    assert at[inside].tolist() == list(range(8))


@pytest.mark.parametrize(
    "factors, ring", [(("l", "s"), True), (("l", "z"), False), (("l", "s", "z"), True)]
)
def test_keys_are_sent_around_a_ring_where_they_are_split(factors, ring):
    queries, keys = (((0, 2), (6, 2)),), (((2, 2), (4, 2)),)
    found = shared_attention(loss_op(), JointSplit(factors), "cp", 1, queries, keys)
    assert (found.queries, found.keys) == (queries, keys if ring else ())
    assert (found.axis, found.position) == ("cp", 1)


def test_rows_are_sent_to_experts_where_they_are_split_and_kept_where_they_are_whole():
    one = next(one for one in CALLS if one.op.kind == "experts")
    analysis, mesh = analyze(one.graph), Mesh.parse("ep=2")
    count = one.values[one.op.operands[3]].shape[0]
    owners = tuple(int(expert >= -(-count // 2)) for expert in range(count))
    (rows_and_experts,) = analysis.rules["y"].routes
    for choice, expected in (
        (Route(*rows_and_experts), ((Hop("ep", owners, is_last=True),), (0,) * count)),
        (Split(rows_and_experts[1]), ((), owners)),
    ):
        instructions = lower(one.graph, analysis, Decisions(mesh, {"y": (choice,)}, {}), 1)
        (found,) = (i.routing for i in instructions.instructions if isinstance(i, Compute))
        assert (found.hops, found.split) == expected


@pytest.mark.parametrize("chosen, hops", [(2, 1), (3, 2)])
def test_tokens_with_more_than_two_experts_go_to_hosts_first(chosen, hops):
    one = call(
        "shardwright.experts.default",
        *(f(8, 6), i(8, chosen, below=4), u(8, chosen), f(4, 14, 6), f(4, 6, 7), [True, True]),
        "transformers.grouped_mm_fallback.default",
        GATED,
    )
    analysis, mesh = analyze(one.graph), Mesh.parse("ep=4")
    (rows_and_experts,) = analysis.rules["y"].routes
    decisions = Decisions(mesh, {"y": (Route(*rows_and_experts),)}, {}, host_devices=2)
    (found,) = (
        i.routing
        for i in lower(one.graph, analysis, decisions, 1).instructions
        if isinstance(i, Compute)
    )
    assert len(found.hops) == hops


def test_rows_that_no_table_has_are_no_number():
    found = embedding_tile(torch.ones(2, 3), torch.tensor([0, 3, 5, -1, 6]), (2, 2, 6), -1, False)
    assert found[:3, 0].tolist() == [0, 1, 0]
    assert found[3:].isnan().all()
