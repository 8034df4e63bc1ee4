"""Queries of a sequence split over devices: what one rank runs, and what the slowest costs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Compute
from shardwright.program.lower.rank_program import lower
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.simulate.costs.compute import forward_seconds
from shardwright.simulate.costs.workload import workload
from shardwright.tracing.capture import capture_call
from shardwright.tracing.own_operators import causal_rows

LENGTH = 10


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def captured(keys=LENGTH, requires_grad=False):
    shapes = (2, 3, LENGTH, 4), (2, 3, keys, 4), (2, 3, keys, 5)
    given = tuple(torch.ones(shape, requires_grad=requires_grad) for shape in shapes)
    return capture_call(Attention(), given).graph


def instruction(word, rank):
    graph, mesh = captured(), Mesh.parse("cp=4")
    analysis = analyze(graph)
    (op,) = graph.ops
    tilings = {op.name: parse_tiling(analysis.rules[op.name], (word,))}
    (found,) = (
        i
        for i in lower(graph, analysis, Decisions(mesh, tilings, {}), rank).instructions
        if isinstance(i, Compute)
    )
    return found


def test_a_part_of_the_queries_knows_its_place():
    for rank, place in enumerate([(0, 3), (3, 3), (6, 3), (9, 1)]):
        found = instruction("l", rank)
        assert found.op.target == "shardwright.causal_rows.default"
        assert found.op.args[3] == (*place, LENGTH)
        assert found.shapes == ((2, 3, place[1], 5),)
    assert instruction("-", 1).op.target == "aten.scaled_dot_product_attention.default"


@pytest.mark.parametrize("largest", [2**24, 3 * 40])  # the latter: sixteen queries at a time
@pytest.mark.parametrize("tile", [(0, 17, 40), (17, 23, 40), (1, 1, 2, 3, 17, 20)])
def test_queries_in_groups_see_what_they_would_together(tile, largest, monkeypatch):
    monkeypatch.setattr(causal_rows, "_LARGEST_MASK", largest)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 40, 4, generator=generator).double() for heads in (6, 3, 3)]
    for x in whole:
        x.requires_grad_()
    rows = causal_rows._rows(tile, torch.device("cpu"))
    expected = scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)[
        ..., rows, :
    ]
    query, key, value = whole
    found = torch.ops.shardwright.causal_rows(query[..., rows, :], key, value, tile, 0.3, True)
    weight = torch.randn(expected.shape, generator=generator).double()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), whole) for y in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_last_part_of_a_causal_sequence_sees_most():
    """All rows see half of the keys on average, the last two of ten see nine of them."""
    every = _seconds(captured(keys=5), LENGTH)  # not as many keys as queries: taken for all
    half, last = (_seconds(captured(), rows) for rows in (LENGTH, 2))
    assert half == pytest.approx(every)
    assert last / 2 == pytest.approx(half / LENGTH * 1.8)


def _seconds(graph, rows):
    """Forward, of the products alone, with `rows` of the queries on the device."""
    device = replace(preset("8xV100").device, bytes_per_s=1e30, launch_seconds=0.0)
    device = replace(device, issue_seconds=0.0, units=0)
    (op,) = graph.ops
    rule = analyze(graph).rules[op.name]
    sizes = [[rows if factor.name == "l" else factor.size] for factor in rule.factors]
    return float(forward_seconds(workload(op, rule, graph), np.array(sizes), device)[0])
