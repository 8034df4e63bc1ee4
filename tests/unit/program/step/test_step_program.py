"""Step programs: how they are lowered, that passes keep them right, and that breaks are seen."""

import itertools
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.ir.graph import VerifyError
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.redistribution import Collective
from shardwright.program.decisions import Decisions
from shardwright.program.lower.micro_batches import lower_micro
from shardwright.program.step.dead_code import forward_only, without_update
from shardwright.program.step.instructions import (
    Accumulate,
    Backward,
    Forward,
    Free,
    Transfer,
    Update,
    Wait,
)
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.lower.step_builder import LoweringInput
from shardwright.program.step.optimize import PASSES, optimized
from shardwright.program.step.order import check_order
from shardwright.program.step.passes.prefetch import prefetch
from shardwright.program.step.verify import verify
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.placements import parse_tiling
from tests.unit.program.lower.test_micro_batches import lowered
from tests.unit.program.lower.test_rank_program import ANALYSIS, GRAPH, STRATEGIES, TENSOR, WHOLE

GOLDEN = Path(__file__).parents[3] / "golden" / "step_programs.txt"


def naive(strategy, rank=0, count=2):
    mesh = Mesh.parse(STRATEGIES[strategy][0])
    micro = lowered(strategy, rank, count)
    return lower_step(LoweringInput(mesh, rank, GRAPH, micro.programs, micro.reductions))


def ranks(strategy, make=optimized):
    size = Mesh.parse(STRATEGIES[strategy][0]).size
    return [make(naive(strategy, rank)) for rank in range(size)]


def test_programs_match_the_golden_page():
    page = "\n".join(
        f"{strategy}\n\n{program}\n\nafter {', '.join(optimized(program).passes)}\n\n"
        f"{optimized(program)}\n"
        for strategy in STRATEGIES
        for program in [naive(strategy, 1)]
    )
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text(), "rerun with UPDATE_GOLDEN=1 and read the diff"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_passes_in_order_leave_a_program_that_runs_and_moves_the_same(strategy):
    draw = random.Random(strategy)
    start = naive(strategy, count=3)
    verify(start)
    moved = Counter()
    for one in start.transfers():
        moved[one.collective, one.channel] += one.bytes
    for _ in range(12):
        chosen = [one for one in PASSES if draw.random() < 0.6]
        program = optimized(start, chosen)
        found = Counter()
        for one in program.transfers():
            found[one.collective, one.channel] += one.bytes
        assert found == moved
        assert program.returned == start.returned
        ops = Counter(
            op for one in program.instructions if isinstance(one, Forward) for op in one.ops
        )
        assert set(ops.values()) == {3}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [lambda program: program, optimized])
def test_programs_of_all_ranks_fit_together(strategy, make):
    check_order(ranks(strategy, make))


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "one device"])
def test_a_rank_that_leaves_out_or_swaps_a_collective_is_found(strategy):
    programs = ranks(strategy)
    first, *others = programs
    places = [i for i, one in enumerate(first.instructions) if isinstance(one, Transfer)]
    for at in places:
        handle = first.instructions[at].handle
        rest = [
            one
            for one in first.instructions
            if not (isinstance(one, Transfer | Wait) and one.handle == handle)
        ]
        with pytest.raises(VerifyError):
            check_order([replace(first, instructions=tuple(rest)), *others])
    for a, b in itertools.pairwise(places):
        swapped = list(first.instructions)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        mine, theirs = swapped[a], swapped[b]
        if [p.move.whole for p in mine.parts] != [p.move.whole for p in theirs.parts]:
            with pytest.raises(VerifyError):
                check_order([replace(first, instructions=tuple(swapped)), *others])


def test_gradients_of_micro_batches_that_move_to_another_layout_do_not_pile_up():
    mesh = Mesh.parse("tp=2")
    stored = {**dict.fromkeys(WHOLE, "S(0)"), "up.weight": "S(1)", "down.weight": "S(0)"}
    tilings = {
        op.name: parse_tiling(ANALYSIS.rules[op.name], (TENSOR[op.name],)) for op in GRAPH.ops
    }
    storage = {name: Layout.parse(f"tp:{word}", mesh) for name, word in stored.items()}
    micro = lower_micro(
        GRAPH, ANALYSIS, micro_batches(GRAPH, ANALYSIS, 3), Decisions(mesh, tilings, storage), 0
    )
    program = optimized(lower_step(LoweringInput(mesh, 0, GRAPH, micro.programs, micro.reductions)))
    known = purposes(program)
    moved, under_way, most = 0, set(), 0
    for one in program.instructions:
        if isinstance(one, Transfer) and known[one.handle] is Purpose.GRADIENT:
            if one.collective is Collective.ALL_TO_ALL:
                moved += 1
                under_way.add(one.handle)
        elif isinstance(one, Wait):
            under_way.discard(one.handle)
        most = max(most, len(under_way))
    assert moved == 2 * 3, "both weights, in each micro-batch"
    assert most == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_any_one_instruction_a_program_is_refused(strategy):
    program = optimized(naive(strategy))
    for at, one in enumerate(program.instructions):
        if isinstance(one, Free | Update):
            continue  # values live longer, and are the same; or parameters are: numbers tell
        rest = program.instructions[:at] + program.instructions[at + 1 :]
        if isinstance(one, Accumulate) and any(
            isinstance(other, Accumulate) and other.total == one.total for other in rest
        ):
            continue  # the sum is another one: numbers tell
        if isinstance(one, Backward) and not one.made and not one.totals:
            continue
        with pytest.raises(VerifyError):
            verify(replace(program, instructions=rest))


def test_an_update_comes_behind_all_gradients_and_readers_of_parameters():
    program = optimized(naive("fully sharded"))
    *before, update = program.instructions
    assert isinstance(update, Update)
    assert {leaf for leaf, _ in update.parameters} == set(program.leaves)

    def refused(match, *instructions):
        with pytest.raises(VerifyError, match=match):
            verify(replace(program, instructions=instructions))

    refused("after the update", *before, update, *before[:1])
    refused("before it is defined", update)
    other = Update((("up.weight", "total/up.bias"),))
    refused("takes other gradients", *before, other)
    assert without_update(program).instructions == tuple(before)


def test_a_pass_that_breaks_a_program_is_named():
    def forgets_a_wait(program):
        waits = [one for one in program.instructions if isinstance(one, Wait)]
        rest = [one for one in program.instructions if one is not waits[0]]
        return replace(program, instructions=tuple(rest))

    with pytest.raises(VerifyError, match=r"^after the pass forgets_a_wait: "):
        optimized(naive("fully sharded"), (prefetch, forgets_a_wait))
    with pytest.raises(VerifyError, match=r"^(?!after)"):
        optimized(forgets_a_wait(naive("fully sharded")))


def test_gathers_start_while_the_bucket_before_is_read():
    program = prefetch(naive("fully sharded"))
    kinds = purposes(program)
    copies = [
        one
        for one in program.instructions
        if isinstance(one, Transfer | Wait) and kinds[one.handle] is Purpose.COPY
    ]
    # up.weight; up.bias is started when up.weight is there, and so on.
    words = ["start" if isinstance(one, Transfer) else "wait" for one in copies]
    assert words == ["start", "wait", "start", "wait", "start", "wait", "start", "wait"]
    forward = [i for i, one in enumerate(program.instructions) if isinstance(one, Forward)]
    started = [i for i, one in enumerate(program.instructions) if one in copies[4:6:2]]
    assert max(started) < forward[0], "the second layer's weight is gathered before the first runs"


def test_evaluation_has_no_backward_pass_and_saves_nothing():
    program = forward_only(optimized(naive("fully sharded")))
    verify(program)
    assert not any(isinstance(one, Backward) for one in program.instructions)
    assert not any(one.saves for one in program.instructions if isinstance(one, Forward))
    assert {one.collective.value for one in program.transfers()} == {"all_gather", "all_reduce"}


def test_a_sum_that_is_read_before_all_is_added_is_refused():
    """Seen in a bucket of sums that was reduced before a scattered gradient had arrived."""
    program = without_update(naive("data parallel"))
    at = next(i for i, one in enumerate(program.instructions) if isinstance(one, Accumulate))
    last = max(
        i
        for i, one in enumerate(program.instructions)
        if isinstance(one, Accumulate) and one.total == "total/up.weight"
    )
    instructions = list(program.instructions)
    instructions.append(instructions.pop(last))
    assert at != last
    with pytest.raises(VerifyError, match=r"adds to %total/up.weight after it was read"):
        verify(replace(program, instructions=tuple(instructions)))
