"""Law 5: every written rule, run on tiles, gives the serial result, and the serial gradients.

Ranks are simulated: each runs its own lowered instruction on its own tiles, and what they return
is put together as the rule says.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.ir.hosts import neighbours
from shardwright.ir.layout import Mesh, Replicate
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Compute, Dropout, Joint, SharedAttention, Uniform
from shardwright.program.lower.rank_program import ProgramLayouts, op_layouts_of, write
from shardwright.program.lower.zigzag_order import computes_each_index, reordered
from shardwright.rules.analysis import analyze
from shardwright.rules.operators import table
from shardwright.rules.placements import tiling_text, tilings
from shardwright.rules.rule import FactorKind, JointSplit, Route, Split
from shardwright.runtime.attention.ring_attention import TiledAttention
from shardwright.runtime.comm.joint_reductions import joint
from shardwright.runtime.random.dropout import GlobalDropout, GlobalUniform, random_state
from shardwright.runtime.sharded_ops.experts import LocalExperts
from shardwright.runtime.verify.verify_reference import in_parts
from shardwright.tracing.export.operators import call_op, to_torch
from tests.harness.drawn_tensors import f, i, u
from tests.harness.operator_calls import CALLS, GATED, call
from tests.harness.rank_threads import Meeting
from tests.harness.resized_calls import free_sizes, resized
from tests.harness.rotation import rotating
from tests.harness.simulated_ranks import gather, scatter

MESHES = [Mesh.parse(text) for text in ("a=2", "a=3", "a=2 b=2")]
CPU = torch.device("cpu")
MADE_UP = ("empty", "empty_like", "new_empty")  # of these only the shape is defined
# What the backward pass needs and nobody else may read.
PER_PART = (("local_batch_norm", 1), ("local_batch_norm", 2))
RESIZABLE = [one for one in CALLS if resized(one, {s: 2 * s for s in free_sizes(one)})[1]]
# Of each call one mesh or more, of each kind of operator one axis and two.
RUN = rotating(
    [(one, mesh) for one in CALLS for mesh in MESHES],
    3,
    kinds=lambda case: [case[0].name, (case[0].op.kind, len(case[1].axes)), str(case[1])],
)
GOLDEN = Path(__file__).parents[1] / "golden" / "rules.txt"


def test_every_rule_is_called():
    written = {
        *table.TEXT,
        *table.BUILDERS,
        *table.ELEMENTWISE,
        *table.LINEAR,
        *table.LOSSES,
        *table.REDUCTIONS,
        *table.ALONG_DIM,
    }
    assert {one.op.kind for one in CALLS} == written


@pytest.mark.parametrize("one, mesh", RUN, ids=lambda one: getattr(one, "name", str(one)))
def test_tiled_equals_serial(one, mesh):
    _check(one, mesh)


@settings(max_examples=3)
@given(st.data())
@pytest.mark.parametrize("one", RESIZABLE, ids=lambda one: one.name)
def test_tiled_equals_serial_at_any_size(one, data):
    sizes = {size: data.draw(st.integers(2, 13), label=str(size)) for size in free_sizes(one)}
    other, changed = resized(one, sizes)
    assume(changed)
    _check(other, data.draw(st.sampled_from(MESHES), label="mesh"))


def test_every_operator_is_tried_at_other_sizes():
    counted = {"positions", "placements"}  # raise for another number of True elements
    with_sizes = {one.op.kind for one in CALLS if free_sizes(one)} - counted
    assert {one.op.kind for one in RESIZABLE} == with_sizes


@pytest.mark.parametrize(
    "one", rotating(CALLS, 3, kinds=lambda one: [one.op.kind]), ids=lambda one: one.name
)
def test_tiles_in_zigzag_order_give_results_in_that_order(one):
    """Of operators that compute every index by itself, which keep the order of their operands."""
    analysis, mesh = analyze(one.graph), Mesh.parse("a=3")
    found = [
        tiling
        for tiling, op_layouts in tilings(analysis.rules["y"], mesh)
        if computes_each_index(one.op, op_layouts, 0)
    ]
    _check(one, mesh, [tiling for tiling in found if tiling[0] is not None], zigzag=True)


@pytest.mark.parametrize("mesh, host", [("a=4", 2), ("a=6", 3), ("a=4 b=2", 4)])
def test_tokens_that_go_to_hosts_first_give_the_same_sums(mesh, host):
    """Three experts for each token; tokens and experts are not divided evenly."""
    one = call(
        "shardwright.experts.default",
        *(f(17, 6), i(17, 3, below=11), u(17, 3), f(11, 14, 6), f(11, 6, 7), [True, True]),
        "transformers.grouped_mm_fallback.default",
        GATED,
    )  # fmt: skip
    mesh = Mesh.parse(mesh)
    found = [tiling for tiling, _ in tilings(analyze(one.graph).rules["y"], mesh)]
    routed = [tiling for tiling in found if isinstance(tiling[0], Route)]
    assert routed and "a" in neighbours(mesh, host)
    _check(one, mesh, routed, host=host)


def test_operators_that_ask_for_positions_keep_tiles_of_neighbours():
    """They have splits along which results depend on where a tile lies."""
    asking = set()
    for one in CALLS:
        splits = [
            op_layouts
            for tiling, op_layouts in tilings(analyze(one.graph).rules["y"], Mesh.parse("a=2"))
            if isinstance(tiling[0], Split)
        ]
        if splits and not any(computes_each_index(one.op, layout, 0) for layout in splits):
            asking.add(one.op.kind)
    assert asking >= {"amax", "dropout", "local_batch_norm"}, asking


def _check(one, mesh, given=None, *, zigzag=False, host=0):
    """Compare tiled runs with the serial one under the tilings `given`, or all."""
    analysis = analyze(one.graph)
    assert not analysis.unknown
    rule = analysis.rules["y"]
    found = [tiling for tiling, _ in tilings(rule, mesh)] if given is None else given
    alone = _run(one, analysis, Mesh.parse("a=1"), (None,)) if found else {}
    for tiling in found:
        tiled = _run(one, analysis, mesh, tiling, zigzag=zigzag, host=host)
        expected = alone
        if one.op.kind == "local_batch_norm":  # which depends on the parts, and on nothing else
            parts = replace(
                one, graph=in_parts(one.graph, analysis, Decisions(mesh, {"y": tiling}, {}))
            )
            expected = _run(parts, analysis, Mesh.parse("a=1"), (None,))
        for key, value in expected.items():
            torch.testing.assert_close(
                tiled[key],
                value,
                rtol=1e-5 if value.dtype == torch.float32 else 1e-9,
                atol=1e-5 if value.dtype == torch.float32 else 1e-9,
                equal_nan=True,
                msg=lambda text, key=key, tiling=tiling: (
                    f"{key} of {rule} under {' '.join(tiling_text(tiling))} on {mesh}: {text}"
                ),
            )


def test_what_may_be_split_matches_the_golden_page():
    """A rule that loses a factor is still right, so the laws do not notice."""
    page = "".join(f"{one.name}\n    {_describe(one)}\n" for one in CALLS)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text(), "rerun with UPDATE_GOLDEN=1 and read the diff"


def test_gathers_and_scatters_of_single_numbers_have_no_rule():
    number = torch.tensor(2)
    for one in (
        call("gather.default", f(5), 0, number),
        call("scatter.src", f(5), 0, number, f()),
        call("scatter.value", f(5), 0, number, 3.0),
    ):
        assert analyze(one.graph).unknown == ("y",), one.name


def _describe(one):
    rule = analyze(one.graph).rules["y"]
    split = " ".join(f.name for f in rule.factors if f.kind is FactorKind.PARALLEL)
    split += "".join(f" {rows}>{owners}" for rows, owners in rule.routes)
    split += "".join(f" {'~'.join(factors)}" for factors in rule.joint_splits)
    partial = " ".join(f"{sorted(operands)}" for operands in rule.linear)
    return f"{rule}; splits: {split or 'nothing'}; passes partial sums of: {partial or 'nothing'}"


def _run(one, analysis, mesh, tiling, *, zigzag=False, host=0):
    """Results and gradients of a call whose ranks each have their tiles."""
    op = one.op
    op_layouts = op_layouts_of(one.graph, analysis, mesh, {"y": tiling})["y"]
    if zigzag:
        op_layouts = reordered(op_layouts, 0)
    generator = torch.Generator().manual_seed(1)
    operands = [
        [
            tile.detach().clone().requires_grad_(one.values[name].requires_grad)
            for tile in scatter(one.values[name].detach(), analysis.atoms[name], layout, generator)
        ]
        for name, layout in zip(op.operands, op_layouts.operands, strict=True)
    ]
    meeting = Meeting(mesh)

    def run_rank(rank):
        tiles = [of_ranks[rank] for of_ranks in operands]
        return _run_rank(one, analysis, op_layouts, rank, tiles, meeting, host)

    agreeing = any(
        not all(isinstance(p, Replicate) for p in a.placements)
        for a in op_layouts.internal_reductions
    )
    agreeing |= any(isinstance(choice, Route) for choice in tiling)
    shared = any(isinstance(choice, JointSplit) for choice in tiling)
    results = meeting.run(run_rank) if agreeing or shared else list(map(run_rank, range(mesh.size)))
    found = {}
    for k, (name, layout) in enumerate(zip(op.outputs, op_layouts.results, strict=True)):
        if (op.kind, k) in PER_PART:
            continue
        tiles = [result[k] for result in results]
        if op.kind in MADE_UP:
            tiles = [torch.zeros_like(tile) for tile in tiles]
        found[name] = gather([t.detach() for t in tiles], analysis.atoms[name], layout)
        assert found[name].shape == one.results[k].shape
        if tiles[0].requires_grad:
            wanted = torch.randn(
                found[name].shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64
            )
            grads = scatter(wanted, analysis.atoms[name], layout.dual(), generator)

            def go_back(rank, tiles=tiles, grads=grads):
                tiles[rank].backward(grads[rank].to(tiles[rank].dtype), retain_graph=True)

            meeting.run(go_back) if shared else list(map(go_back, range(mesh.size)))
    for tiles, name, layout in zip(operands, op.operands, op_layouts.operand_grads, strict=True):
        if tiles[0].grad is not None:
            grad = gather([tile.grad for tile in tiles], analysis.atoms[name], layout)
            found[f"gradient of {name}"] = found.get(f"gradient of {name}", 0) + grad
    return found


def _run_rank(one, analysis, op_layouts, rank, tiles, meeting, host):
    mesh = meeting.mesh
    placed = ProgramLayouts(mesh, {"y": op_layouts}, {})
    decisions = Decisions(mesh, {"y": op_layouts.tiling}, {}, host_devices=host)
    program = write(one.graph, analysis, placed, decisions, rank)
    kinds = Compute | Dropout | Uniform | Joint | SharedAttention
    (instruction,) = (i for i in program.instructions if isinstance(i, kinds))
    if isinstance(instruction, Joint):
        reduce = meeting.reduce(rank, instruction.axes)
        return [joint(instruction, reduce)(*tiles)]
    if isinstance(instruction, SharedAttention):
        line = meeting.line(rank, instruction.axis)
        return [TiledAttention(instruction, line)(*tiles)]
    if isinstance(instruction, Dropout):
        dropout = GlobalDropout(instruction, CPU)
        return [dropout(tiles[0], random_state(1, 2, CPU))]
    if isinstance(instruction, Uniform):
        return [GlobalUniform(instruction, CPU)(random_state(1, 2, CPU))]
    # An operand named twice is one value: the first of its tiles.
    values = dict(zip(reversed(instruction.op.operands), reversed(tiles), strict=True))
    how = instruction.routing
    if how is not None:
        peers = [meeting.peers(rank, hop.axis) for hop in how.hops]
        experts = LocalExperts(how, peers, CPU)
        results = [experts(*(to_torch(arg, values, CPU) for arg in instruction.op.args))]
    else:
        results = call_op(instruction.op, values, CPU)
    for k, result in enumerate(results):
        assert tuple(result.shape) == instruction.shapes[k] or (one.op.kind, k) in PER_PART
    return results
