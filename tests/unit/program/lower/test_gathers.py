"""Gathers in buckets: which together, sent for and read where."""

import torch
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Fetch, Gather, Prefetch, Redistribute, Reduce, writes
from shardwright.program.lower.buckets import bucketed
from shardwright.program.lower.gathers import gathered
from shardwright.program.lower.rank_program import lower, verify
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.tracing.capture import capture_call

MESH = Mesh.parse("dp=2")
WIDTH = 512  # a weight has 1 MiB


class Net(nn.Module):
    """Three layers, and the first one's bias once more."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x + self.layers[0].bias.sum()).square().sum()


GRAPH = capture_call(Net(), (torch.ones(6, WIDTH),)).graph


def program(kept_whole=(), graph=GRAPH):
    """The batch is split, parameters are sharded but for those that are `kept_whole`."""
    tilings, analysis = {}, analyze(graph)
    for op in graph.ops:
        factors = {factor.name for factor in analysis.rules[op.name].factors}
        word = next((word for word in ("b0", "m", "d0") if word in factors), "-")
        word = "-" if op.name == "sum" else word  # of a bias: another layout of its gradient
        tilings[op.name] = parse_tiling(analysis.rules[op.name], (word,))
    storage = {
        leaf.name: Layout.parse("dp:R" if leaf.name in kept_whole else "dp:S(0)", MESH)
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
    }
    return bucketed(lower(graph, analysis, Decisions(MESH, tilings, storage), 0), graph)


def of(kind, found):
    return [one for one in found.instructions if isinstance(one, kind)]


def leaves(bucket):
    return [part.value.removesuffix("/local") for part in bucket.parts]


def layer(number):
    return [f"layers.{number}.weight", f"layers.{number}.bias"]


def test_copies_that_are_read_one_after_the_other_share_a_bucket():
    changed = gathered(program(), GRAPH)
    verify(changed)
    expected = [[layer(0)[0], layer(1)[0]], [layer(1)[1], *layer(2)], layer(3)]  # 2 MiB at most
    assert [leaves(one) for one in of(Gather, changed)] == expected
    assert [leaves(one) for one in of(Prefetch, changed)] == expected


def test_a_bucket_sets_out_before_the_one_ahead_of_it_is_read():
    changed = gathered(program(), GRAPH)
    order = [
        f"{type(one).__name__} {one.flight.removeprefix('flight/')}"
        for one in changed.instructions
        if isinstance(one, Prefetch | Gather)
    ]
    there = ["Prefetch 0", "Prefetch 1", "Gather 0", "Prefetch 2", "Gather 1", "Gather 2"]
    assert order == there
    defined = [name for one in changed.instructions for name in writes(one)]
    assert defined.index("linear") < defined.index("flight/2") < defined.index("linear_1")


def test_each_flight_knows_the_one_before():
    changed = gathered(program(), GRAPH)
    assert [one.before for one in of(Prefetch, changed)] == ["", "flight/0", "flight/1"]


def test_what_has_two_readers_goes_alone():
    changed = gathered(program(), GRAPH)
    alone = {one.value for one in of(Redistribute, changed)}
    assert "layers.0.bias/local" in alone
    assert not alone & {f"{name}/local" for number in (1, 2, 3) for name in layer(number)}


def test_programs_without_sharded_parameters_stay_as_they_are():
    whole = [name for number in range(4) for name in layer(number)]
    assert gathered(program(whole), GRAPH) == program(whole)
    changed = gathered(program(layer(3)), GRAPH)
    assert layer(3)[0] not in {name for one in of(Gather, changed) for name in leaves(one)}
    assert len(of(Fetch, changed)) == len(of(Fetch, program(layer(3))))


def test_frozen_parameters_fill_buckets_of_their_own():
    """With those that are trained they would get a gradient, and room for it, that nobody wants."""
    net = Net()
    for number in (1, 3):
        net.layers[number].requires_grad_(False)
    graph = capture_call(net, (torch.ones(6, WIDTH),)).graph
    changed = gathered(program(graph=graph), graph)
    verify(changed)
    assert [leaves(one) for one in of(Gather, changed)] == [
        [layer(0)[0], layer(2)[0]],
        layer(1),
        [layer(2)[1]],
        layer(3),
    ]
    trained = [any(part.backward for part in one.parts) for one in of(Gather, changed)]
    assert trained == [True, False, True, False]
    in_sums = {name for one in of(Reduce, changed) for name in leaves(one)}
    assert not in_sums & {*layer(1), *layer(3)}
