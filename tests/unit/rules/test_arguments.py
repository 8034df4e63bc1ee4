"""Arguments of operators that depend on sizes are those of a rank's tile."""

import torch
from torch import nn

import shardwright as sw
from shardwright.rules.arguments import localize


def test_a_tile_of_whole_groups_of_a_transposed_convolution_has_their_number():
    model = nn.Sequential(nn.ConvTranspose2d(8, 12, (2, 5), groups=4))
    graph = sw.capture(model, (torch.zeros(2, 8, 7, 7),), loss="outside")
    op = next(op for op in graph.ops if "conv" in op.target)
    shape = graph.tensor[op.outputs[0]].shape
    assert shape == (2, 12, 8, 11)
    # Half of the groups: each has two channels of the input and three of the result.
    tile = localize(op, (shape,), ((2, 4, 7, 7), (4, 3, 2, 5), (6,)), ((2, 6, 8, 11),))
    assert (op.args[6], tile.args[6]) == (4, 2)


def test_a_local_batch_norm_adds_its_part_of_the_batch_to_the_statistics():
    model = nn.BatchNorm1d(3)
    graph = sw.capture(model, (torch.zeros(8, 3),), batch_norm="local", loss="outside")
    op = next(op for op in graph.ops if op.kind == "local_batch_norm")
    shapes = tuple(graph.tensor[name].shape for name in op.outputs)
    tile = localize(op, shapes, ((2, 3), (3,), (3,)), ((2, 3), *shapes[1:]))
    assert (op.args[3], tile.args[3]) == (1.0, 0.25)
