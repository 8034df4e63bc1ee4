"""Programs of micro-batches: what is printed is what one rank runs, piece by piece."""

import os
from pathlib import Path

from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Redistribute
from shardwright.program.lower.micro_batches import lower_micro
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.placements import parse_tiling
from tests.unit.program.lower.test_rank_program import ANALYSIS, GRAPH, STRATEGIES, WHOLE

GOLDEN = Path(__file__).parents[3] / "golden" / "micro_programs.txt"


def lowered(strategy, rank, count=2):
    axis, words, stored = STRATEGIES[strategy]
    mesh = Mesh.parse(axis)
    tilings = {
        op.name: parse_tiling(ANALYSIS.rules[op.name], (words[op.name],)) for op in GRAPH.ops
    }
    storage = {
        name: Layout.parse(f"{mesh.names[0]}:{place}", mesh) for name, place in stored.items()
    }
    micro = micro_batches(GRAPH, ANALYSIS, count)
    return lower_micro(GRAPH, ANALYSIS, micro, Decisions(mesh, tilings, storage), rank)


def test_programs_match_the_golden_page():
    page = "\n".join(f"{strategy}\n{lowered(strategy, 1)}\n" for strategy in STRATEGIES)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text(), "rerun with UPDATE_GOLDEN=1 and read the diff"


def collectives(strategy):
    """Per parameter, what every micro-batch's program moves of it, and what is done at the end."""
    found = lowered(strategy, 0)
    moved = {name: [] for name in WHOLE}
    for program in found.programs:
        for one in program.instructions:
            if isinstance(one, Redistribute) and one.value.removesuffix("/local") in moved:
                steps = [m.collective for m in (*one.forward, *one.backward)]
                moved[one.value.removesuffix("/local")] += [
                    step.value for step in steps if step.moves_data
                ]
    for one in found.reductions:
        moved[one.value] += ["at the end", *(move.collective.value for move in one.forward)]
    return moved


def test_gradients_of_replicated_parameters_are_reduced_once():
    once = ["at the end", "all_reduce"]
    assert collectives("data parallel") == dict.fromkeys(WHOLE, once)


def test_sharded_parameters_are_gathered_and_their_gradients_scattered_each_time():
    each = ["all_gather", "reduce_scatter"] * 2
    assert collectives("fully sharded") == dict.fromkeys(WHOLE, each)


def test_nothing_is_communicated_along_the_axis_of_micro_batches():
    for strategy in STRATEGIES:
        for program in lowered(strategy, 0).programs:
            moves = [
                move
                for one in program.instructions
                if isinstance(one, Redistribute)
                for move in (*one.forward, *one.backward)
            ]
            assert all(not m.collective.moves_data for m in moves if m.axis == "mb")
            assert moves
