"""From graph and tilings to programs: what is printed is what one rank runs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.graph import LeafKind, Op, Ref, VerifyError
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.options.numerics import Numerics
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Attention, Compute, Load, Redistribute
from shardwright.program.lower.rank_program import input_layouts, lower, verify
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.tracing.capture import capture_call
from tests.harness import models

GOLDEN = Path(__file__).parents[3] / "golden" / "programs.txt"


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().sum()


def captured(model, *args, **numerics):
    graph = capture_call(model, args, numerics=Numerics(**numerics)).graph
    return graph, analyze(graph)


GRAPH, ANALYSIS = captured(TwoLayers(), torch.ones(5, 6))

# The factors of linear are b0, k and n; of the others d0 and d1.
DATA = {"linear": "b0", "relu": "d0", "linear_1": "b0", "square": "d0", "sum": "d0"}
TENSOR = {"linear": "n", "relu": "d1", "linear_1": "k", "square": "-", "sum": "-"}
WHOLE = {"up.weight": "R", "up.bias": "R", "down.weight": "R", "down.bias": "R"}
STRATEGIES = {
    "data parallel": ("dp=2", DATA, WHOLE),
    "tensor parallel": (
        "tp=2",
        TENSOR,
        {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)", "down.bias": "R"},
    ),
    "fully sharded": (
        "dp=2",
        DATA,
        {"up.weight": "S(1)", "up.bias": "S(0)", "down.weight": "S(0)", "down.bias": "S(0)"},
    ),
}


def lowered(strategy, rank):
    axis, words, stored = STRATEGIES[strategy]
    mesh = Mesh.parse(axis)
    tilings = {
        op.name: parse_tiling(ANALYSIS.rules[op.name], tuple(words[op.name].split()))
        for op in GRAPH.ops
    }
    storage = {
        name: Layout.parse(f"{mesh.names[0]}:{place}", mesh) for name, place in stored.items()
    }
    return lower(GRAPH, ANALYSIS, Decisions(mesh, tilings, storage), rank)


def test_programs_match_the_golden_page():
    programs = [
        f"{strategy}\n{lowered(strategy, rank)}\n" for strategy in STRATEGIES for rank in (0, 1)
    ]
    page = "\n".join(programs)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text(), "rerun with UPDATE_GOLDEN=1 and read the diff"


def collectives(strategy):
    """Every collective of rank 0's program, forward and backward, by the value it moves."""
    found = {}
    for one in lowered(strategy, 0).instructions:
        if isinstance(one, Redistribute):
            forward = [move.collective.value for move in one.forward]
            backward = [move.collective.value for move in one.backward]
            found[one.value.removesuffix("/local")] = (forward, backward)
    return found


def test_data_parallel_reduces_gradients_and_the_loss():
    reduced = ([], ["all_reduce"])
    assert collectives("data parallel") == {
        **dict.fromkeys(WHOLE, reduced),
        "sum": (["all_reduce"], []),
    }


def test_tensor_parallel_reduces_once_and_masks_the_bias_of_partial_sums():
    assert collectives("tensor parallel") == {
        "down.bias": (["mask"], []),
        "linear_1": (["all_reduce"], []),
    }


def test_fully_sharded_gathers_weights_and_scatters_their_gradients():
    gathered = (["all_gather"], ["reduce_scatter"])
    assert collectives("fully sharded") == {
        **dict.fromkeys(WHOLE, gathered),
        "sum": (["all_reduce"], []),
    }


def test_tiles_are_uneven_where_sizes_are():
    for strategy, shape in (
        ("data parallel", [(3, 9), (2, 9)]),
        ("tensor parallel", [(5, 5), (5, 4)]),
    ):
        for rank in (0, 1):
            (relu,) = (
                one
                for one in lowered(strategy, rank).instructions
                if isinstance(one, Compute) and one.op.kind == "relu"
            )
            assert relu.shapes == (shape[rank],)


def _whole(graph, mesh):
    tilings = {op.name: (None,) * len(mesh.axes) for op in graph.ops}
    storage = {leaf.name: Layout.replicated(mesh) for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    return tilings, storage


@pytest.mark.parametrize("example", [models.cnn, models.mlp, models.traps, models.no_loss])
def test_replicated_programs_move_nothing(example):
    model, batch = example()
    graph = capture_call(model, (), batch).graph
    mesh = Mesh.parse("a=2 b=2")
    program = lower(graph, analyze(graph), Decisions(mesh, *_whole(graph, mesh)), rank=3)
    assert not any(isinstance(one, Redistribute) for one in program.instructions)


class Reader(nn.Module):
    """An input and a hidden value with several readers."""

    def forward(self, x):
        hidden = x * 2.0
        return hidden.exp().sum() + hidden.sin().sum() + hidden.cos().sum() + x.sum()


def _tiled(graph, analysis, mesh, words):
    return {
        op.name: parse_tiling(analysis.rules[op.name], (words.get(op.name, "-"),))
        for op in graph.ops
    }


def test_readers_that_want_the_same_share_one_redistribution():
    x = torch.ones(6, 4, requires_grad=True)
    graph, analysis = captured(Reader(), x)
    mesh = Mesh.parse("a=2")
    words = {"mul": "d0", "exp": "d1", "sin": "d1", "cos": "d0", "sum": "d1", "sum_1": "d1"}
    decisions = Decisions(mesh, _tiled(graph, analysis, mesh, words), {})
    program = lower(graph, analysis, decisions, 0)
    moved = [one.value for one in program.instructions if isinstance(one, Redistribute)]
    assert moved.count("mul") == 1


def test_an_input_is_cut_where_all_its_readers_agree():
    graph, analysis = captured(Reader(), torch.ones(6, 4))
    mesh = Mesh.parse("a=2")

    def layout(words):
        return str(
            input_layouts(graph, analysis, mesh, _tiled(graph, analysis, mesh, words))["args.0"]
        )

    assert layout({"mul": "d0", "sum_3": "d0"}) == "a:S(0)"
    assert layout({"mul": "d0", "sum_3": "d1"}) == "a:R"
    assert layout({"mul": "d0"}) == "a:R"
    assert layout({"mul": "+0", "sum_3": "+0"}) == "a:R", "inputs are never partial sums"


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, x, keys):
        return F.scaled_dot_product_attention(self.query(x), keys, keys, dropout_p=0.5).sum()


@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (1, 6)])
@pytest.mark.parametrize("split, heads_at, queries_at", [("h", 3, 0), ("l", 0, 4)])
def test_dropout_of_attention_draws_at_the_positions_of_scores(heads, split, heads_at, queries_at):
    queries, keys = (torch.ones(count, size, 4) for count, size in zip(heads, (8, 10), strict=True))
    graph, analysis = captured(Attending(), queries, keys, rng="fast")
    mesh = Mesh.parse("cp=2")
    tilings = _tiled(graph, analysis, mesh, {"scaled_dot_product_attention": split})
    stored = {f"query.{name}": Layout.parse("cp:R", mesh) for name in ("weight", "bias")}
    program = lower(graph, analysis, Decisions(mesh, tilings, stored), 1)
    (attention,) = (one for one in program.instructions if isinstance(one, Attention))
    of_heads, of_queries = (heads_at, 6 - heads_at, 6), (queries_at, 8 - queries_at, 8)
    assert attention.positions == ((of_heads,), (of_queries,), ((0, 10, 10),))


PROGRAM = lowered("tensor parallel", 0)


def changed(instruction, **fields):
    """The program with the first instruction of this type changed."""
    done = False
    found = []
    for one in PROGRAM.instructions:
        if isinstance(one, instruction) and not done:
            one, done = replace(one, **fields), True
        found.append(one)
    return replace(PROGRAM, instructions=tuple(found))


RELU = Op("relu", "aten.relu.default", (Ref("nothing"),), (), ("relu",))
BROKEN = {
    "reads what is not there": (changed(Redistribute, value="nothing"), "reads %nothing before"),
    "loads what is no leaf": (changed(Load, leaf="nothing"), "reads %nothing before"),
    "computes with what is not there": (changed(Compute, op=RELU), "reads %nothing before"),
    "reads too early": (
        replace(PROGRAM, instructions=PROGRAM.instructions[::-1]),
        "before it is defined",
    ),
    "defines twice": (
        replace(PROGRAM, instructions=PROGRAM.instructions * 2),
        "defines %up.weight/local twice",
    ),
    "defines a leaf": (changed(Load, result="args.0"), "defines %args.0 twice"),
    "returns what is not there": (
        replace(PROGRAM, outputs=("nothing",)),
        "%nothing is returned but never defined",
    ),
    "updates with what is not there": (
        replace(PROGRAM, updates=(("buffer", "nothing"),)),
        "%nothing is returned but never defined",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_named(name):
    program, message = BROKEN[name]
    verify(PROGRAM)
    with pytest.raises(VerifyError) as broken:
        verify(program)
    assert message in str(broken.value)
