"""Causal attention over a split sequence: what is reordered, of real models, and where."""

from dataclasses import replace

import pytest
from torch import nn

import shardwright as sw
from shardwright.ir.redistribution import SWAPS
from shardwright.program.instructions import Redistribute, SharedAttention
from shardwright.program.lower.micro_batches import flattened
from shardwright.program.lower.rank_program import lower
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from tests.harness import models
from tests.harness.causal_decoder import Decoder, Running, words


def swapped(model, batch, strategy="cp=2", returned=()):
    """The values that the first of two devices exchanges to change their order; its program."""
    graph = sw.capture(model, (), batch)
    analysis = analyze(graph)
    plan = sw.price(graph, "2xcpu", strategy, "sgd")
    decisions = read_plan(plan, graph, analysis)
    graph = replace(graph, outputs=(*graph.outputs, *returned))
    program = lower(graph, analysis, decisions, 0)
    found = [
        one.value
        for one in flattened(program.instructions)
        if isinstance(one, Redistribute)
        and any(move.collective in SWAPS for move in (*one.forward, *one.backward))
    ]
    return found, program, plan


@pytest.mark.parametrize("strategy", ["cp=2", "cp=2 ac=full", "cp=2 mb=2"])
def test_tokens_are_reordered_and_nothing_else(strategy):
    found, program, plan = swapped(*models.llama(layers=3, batch=4, length=12), strategy)
    assert found == ["kwargs.input_ids"]
    listed = [t for t in plan.transfers if t.collectives[0].startswith("swap")]
    assert [(t.value, t.phase.value) for t in listed] == [("kwargs.input_ids", "forward")]
    shared = [i for i in flattened(program.instructions) if isinstance(i, SharedAttention)]
    assert [one.queries for one in shared] == [(((0, 3), (9, 3)), ((3, 3), (6, 3)))] * 3


def test_labels_are_cut_in_order_from_the_whole():
    """As models shift them by one position, every device has all of them."""
    _, program, _ = swapped(*models.llama(batch=4, length=12))
    cut = [
        move.halves
        for one in program.instructions
        if isinstance(one, Redistribute)
        for move in one.forward
        if move.halves
    ]
    assert cut and set(cut) == {((0, 3), (9, 3))}


def test_returned_logits_are_put_back_before_they_are_wide():
    """The residual of the last layer, and what is added to it, have half of their width."""
    found, _, _ = swapped(Decoder(), words(), returned=["linear_2"])
    assert found == ["kwargs.ids", "scaled_dot_product_attention_1", "add"]


@pytest.mark.parametrize(
    "between, expected",
    [
        (nn.Dropout(0.5), ["scaled_dot_product_attention", "dropout"]),  # draws ask for positions
        (Running(), ["view_1", "cumsum"]),
    ],
    ids=["dropout", "running"],
)
def test_operators_that_need_neighbours_are_given_them(between, expected):
    found, _, plan = swapped(Decoder(between), words())
    assert found[:3] == ["kwargs.ids", *expected]
    listed = {t.value for t in plan.transfers if t.collectives[0].startswith("swap")}
    assert listed == {*found}


def test_ulysses_and_plans_without_a_split_sequence_have_no_order():
    for strategy in ("cp=2 cp_style=ulysses", "dp_shard=2", "tp=2"):
        assert swapped(*models.small_llama(1, 16, 4, 4, 12), strategy)[0] == []
