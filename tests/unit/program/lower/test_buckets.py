"""Parameters in buckets: which together, loaded and summed where."""

from collections import Counter

import torch
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Compute, Fetch, Load, Redistribute, Reduce, writes
from shardwright.program.lower.buckets import bucketed
from shardwright.program.lower.rank_program import lower, verify
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.tracing.capture import capture_call

MESH = Mesh.parse("dp=2")


class Net(nn.Module):
    """Three layers, a tied one, a sum of parameters, one that is not used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.first, self.second = (nn.Parameter(torch.ones(8)) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.layers[0].weight + (self.first + self.second)).square().sum()


GRAPH = capture_call(Net(), (torch.ones(6, 8),)).graph
ANALYSIS = analyze(GRAPH)


def program(words, stored=None, **chosen):
    """The first rank's program; every operator splits the first factor it has of `words`."""
    tilings = {}
    for op in GRAPH.ops:
        factors = {factor.name for factor in ANALYSIS.rules[op.name].factors}
        word = next((word for word in words if word in factors), "-")
        word = chosen.get(op.name, word)
        tilings[op.name] = parse_tiling(ANALYSIS.rules[op.name], (word,))
    storage = {
        leaf.name: Layout.parse((stored or {}).get(leaf.name, "dp:R"), MESH)
        for leaf in GRAPH.leaves_of(LeafKind.PARAMETER)
    }
    return lower(GRAPH, ANALYSIS, Decisions(MESH, tilings, storage), 0)


def of(kind, program):
    return [one for one in program.instructions if isinstance(one, kind)]


def leaves(fetch):
    return [part.leaf for part in fetch.parts]


DATA = ("b0", "m", "d0")


def test_every_parameter_that_is_read_is_loaded_once():
    for words in ((), DATA):
        for limit in (1, 300, 10**9):
            changed = bucketed(program(words), GRAPH, limit)
            verify(changed)
            assert not of(Load, changed)
            loaded = Counter(name for fetch in of(Fetch, changed) for name in leaves(fetch))
            read = {leaf.name for leaf in GRAPH.leaves_of(LeafKind.PARAMETER)} - {"unused"}
            assert loaded == Counter(read)


def test_on_one_device_buckets_are_filled_in_the_order_of_reading():
    layer = ["layers.0.weight", "layers.0.bias"]
    fetches = of(Fetch, bucketed(program(()), GRAPH, limit=8 * 8 * 4 + 8 * 4))
    assert leaves(fetches[0]) == layer
    assert leaves(fetches[1]) == ["layers.1.weight", "layers.1.bias"]
    (only,) = of(Fetch, bucketed(program(()), GRAPH, limit=10**9))
    assert leaves(only)[:2] == layer and len(only.parts) == 8


def test_a_bucket_is_loaded_where_it_is_first_read():
    changed = bucketed(program(()), GRAPH, limit=1)
    order = [name for one in changed.instructions for name in writes(one)]
    assert order.index("tanh") < order.index("layers.1.weight/local") < order.index("linear_1")


def test_gradients_that_are_only_summed_are_summed_together():
    changed = bucketed(program(DATA), GRAPH, limit=10**9)
    (reduce,) = of(Reduce, changed)
    assert reduce.axes == ("dp",)
    # The sum of two parameters is split, so their gradients are gathered.
    assert [part.value.removesuffix("/local") for part in reduce.parts] == [
        f"layers.{i}.{name}" for i in range(3) for name in ("weight", "bias")
    ]
    before = {one.result: one for one in of(Redistribute, program(DATA))}
    assert all(before[part.result] == part for part in reduce.parts)


def test_a_parameter_with_gradients_in_two_layouts_is_summed_alone():
    changed = bucketed(program(DATA, matmul="n"), GRAPH, limit=10**9)
    (reduce,) = of(Reduce, changed)
    assert "layers.0.weight/local" not in [part.value for part in reduce.parts]
    alone = [one for one in of(Redistribute, changed) if one.value == "layers.0.weight/local"]
    assert len(alone) == 2


def test_sums_are_waited_for_when_the_last_has_set_out():
    """Read backwards: all sums, then the functions that wait for them."""
    changed = bucketed(program(DATA), GRAPH, limit=8 * 8 * 4 + 8 * 4)
    order = [
        type(one).__name__
        for one in changed.instructions
        if isinstance(one, Reduce) or (isinstance(one, Fetch) and _summed(one, changed))
    ]
    assert order == ["Fetch"] * 3 + ["Reduce"] * 3


def test_buckets_of_sums_are_filled_from_the_last_read_parameter():
    changed = bucketed(program(DATA), GRAPH, limit=8 * 8 * 4 + 1)
    layers = [[part.value.split("/")[0] for part in one.parts] for one in of(Reduce, changed)]
    assert layers == [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(3)]


def _summed(fetch, program):
    return any(one.works == fetch.works for one in of(Reduce, program))


def test_stored_shards_are_gathered_and_scattered_one_by_one():
    changed = bucketed(program(DATA, {"layers.1.weight": "dp:S(0)"}), GRAPH, limit=10**9)
    (reduce,) = of(Reduce, changed)
    assert "layers.1.weight/local" not in [part.value for part in reduce.parts]
    moved = [one for one in of(Redistribute, changed) if one.value == "layers.1.weight/local"]
    assert [move.collective.value for move in moved[0].forward] == ["all_gather"]


def test_gradients_that_may_belong_to_two_are_copied():
    (fetch,) = of(Fetch, bucketed(program(()), GRAPH, limit=10**9))
    copied = dict(zip(leaves(fetch), fetch.copied, strict=True))
    biases = {f"layers.{i}.bias" for i in range(3)}  # of a single sample they are just added
    assert {name for name, copies in copied.items() if copies} == {"first", "second", *biases}


def test_without_parameters_nothing_changes():
    graph = capture_call(nn.ReLU(), (torch.ones(3),)).graph
    whole = {op.name: (None,) for op in graph.ops}
    before = lower(graph, analyze(graph), Decisions(MESH, whole, {}), 0)
    assert bucketed(before, graph) == before
    assert of(Compute, before)
