"""Dimensions by unification: what a graph's views and splits say about its weights."""

import pytest
import torch
from torch import nn

from shardwright.rules.analysis import analyze
from shardwright.rules.unify import Dim, equate
from shardwright.tracing.capture import capture_call
from tests.harness import models
from tests.harness.small_graphs import splittable


def atoms(*dims):
    return [[atom.size for atom in dim.atoms()] for dim in dims]


def test_equal_dimensions_are_one():
    a, b, c = Dim(6), Dim(6), Dim(6)
    assert equate([a], [b])
    assert equate([b], [c])
    assert a.find() is c.find()


def test_a_product_refines_a_dimension_and_all_that_equal_it():
    whole, other, heads, width = Dim(24), Dim(24), Dim(4), Dim(6)
    equate([whole], [other])
    assert equate([whole], [heads, width])
    assert atoms(other) == [[4, 6]]
    assert other.atoms()[0] is heads.find()


def test_refinements_meet_from_the_minor_side():
    left, right = [Dim(4), Dim(6)], [Dim(8), Dim(3)]
    assert equate(left, right)
    assert atoms(*left) == [[4], [2, 3]]
    assert atoms(*right) == [[4, 2], [3]]


def test_boundaries_that_do_not_divide_each_other_cannot_be_reconciled():
    whole = Dim(6)
    assert equate([whole], [Dim(2), Dim(3)])
    assert not equate([whole], [Dim(3), Dim(2)])
    assert atoms(whole) == [[2, 3]]


def test_an_atom_is_refined_wherever_it_was_used_before():
    a, b, c = Dim(24), Dim(4), Dim(6)
    equate([a], [b, c])
    assert equate([c], [Dim(2), Dim(3)])
    assert atoms(a, c) == [[4, 2, 3], [2, 3]]


@pytest.mark.hf
def test_the_fused_projection_of_gpt2_is_three_times_heads_times_width():
    model, batch = models.gpt2(layers=2, hidden=30, heads=3)
    analysis = analyze(capture_call(model, (), batch).graph)
    assert not analysis.unknown
    for layer in ("transformer.h.0", "transformer.h.1"):
        assert analysis.atoms[f"{layer}.attn.c_attn.weight"] == ((30,), (3, 3, 10))
        assert analysis.atoms[f"{layer}.attn.c_attn.bias"] == ((3, 3, 10),)
        # What comes out of attention by heads goes into the next projection by the same heads.
        _, heads, width = analysis.dims[f"{layer}.attn.c_attn.weight"][1]
        assert analysis.dims[f"{layer}.attn.c_proj.weight"][0] == (heads, width)
        assert analysis.atoms[f"{layer}.mlp.c_fc.weight"] == ((30,), (120,))
    # One residual stream, from the embedding through every layer to the head.
    (stream,) = analysis.dims["transformer.wte.weight"][1]
    for name in ("ln_1.weight", "attn.c_attn.weight", "mlp.c_fc.weight"):
        for layer in (0, 1):
            assert analysis.dims[f"transformer.h.{layer}.{name}"][0] == (stream,)


@pytest.mark.hf
def test_the_queries_of_llama_are_grouped_and_rotated_in_halves():
    model, batch = models.llama(layers=2)
    analysis = analyze(capture_call(model, (), batch).graph)
    assert not analysis.unknown
    for layer in ("model.layers.0", "model.layers.1"):
        attention = f"{layer}.self_attn"
        # 24 = 3 key-value heads, 2 queries each, 2 rotary halves of 2.
        assert analysis.atoms[f"{attention}.q_proj.weight"] == ((3, 2, 2, 2), (24,))
        assert analysis.atoms[f"{attention}.k_proj.weight"] == ((3, 2, 2), (24,))
        heads, _, half, width = analysis.dims[f"{attention}.q_proj.weight"][0]
        assert analysis.dims[f"{attention}.k_proj.weight"][0] == (heads, half, width)
        assert analysis.dims[f"{attention}.v_proj.weight"][0][0] == heads
        assert analysis.dims[f"{attention}.o_proj.weight"][1][:2] == (
            heads,
            analysis.dims[f"{attention}.q_proj.weight"][0][1],
        )


class Reshaped(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.shapes = first, second

    def forward(self, x):
        one, other = (x.view(5, *shape) for shape in self.shapes)
        return one.sum() + other.sum()


def views_of(first, second):
    graph = capture_call(Reshaped(first, second), (torch.ones(5, 24),)).graph
    analysis = analyze(graph)
    views = [analysis.rules[op.name] for op in graph.ops if op.kind == "view"]
    return analysis.atoms["args.0"], views


def test_views_that_agree_refine_each_other():
    dims, (first, second) = views_of((4, 6), (2, 12))
    assert dims == ((5,), (2, 2, 6))
    assert len(splittable(first)) == len(splittable(second)) == 4


def test_a_view_that_cannot_be_reconciled_stays_alone_with_its_trouble():
    """24 = 4·6 = 6·4: whichever comes second is whole there, but for the batch."""
    dims, (first, second) = views_of((4, 6), (6, 4))
    assert dims == ((5,), (4, 6))
    assert str(first) == "x0 (x1 x2) -> x0 x1 x2"
    assert len(splittable(first)) == 3
    assert len(splittable(second)) == 1
    sizes = [second.factor[name].size for name in splittable(second)]
    assert sizes == [5]


class ReshapedThenAdded(nn.Module):
    def forward(self, x, y):
        return x.view(5, 4, 6).exp().sum() + y.view(5, 6, 4).exp().sum() + (x + y).exp().sum()


def test_plain_equalities_come_before_views_wherever_they_stand():
    """The two views disagree, but what is added is one dimension: only a view pays for it."""
    x = torch.ones(5, 24)
    graph = capture_call(ReshapedThenAdded(), (x, x)).graph
    analysis = analyze(graph)
    (add,) = (op for op in graph.ops if op.kind == "add" and len(graph.tensor[op.name].shape) > 1)
    rule = analysis.rules[add.name]
    assert sorted(rule.factor[name].size for name in splittable(rule)) == [4, 5, 6]
    assert analysis.dims["args.0"] == analysis.dims["args.1"]


def test_every_value_has_the_atoms_its_readers_see():
    """Rules have exactly the atoms of the values that they stand for."""
    for example in (models.cnn, models.mlp, models.traps):
        model, batch = example()
        graph = capture_call(model, (), batch).graph
        analysis = analyze(graph)
        for op in graph.ops:
            rule = analysis.rules[op.name]
            for name, dims in zip(op.operands, rule.operands, strict=True):
                assert rule.atoms(dims) == analysis.atoms[name]
            for name, dims in zip(op.outputs, rule.results, strict=True):
                assert rule.atoms(dims) == analysis.atoms[name]
