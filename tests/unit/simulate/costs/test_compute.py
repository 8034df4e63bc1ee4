from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.graph import LeafKind, Ref
from shardwright.ir.layout import Mesh
from shardwright.machine.calls import Timing
from shardwright.machine.model import Efficiency
from shardwright.rules.analysis import analyze
from shardwright.rules.rule import Split
from shardwright.simulate.costs import compute
from shardwright.simulate.costs.op_calls import UnsizedCall
from shardwright.simulate.costs.tile_sizes import local_sizes
from shardwright.simulate.costs.workload import OperatorClass, workload
from shardwright.tracing.capture import capture_call
from tests.harness.small_graphs import build, linear_layer, op, rule, toy_machine

# 1,024 FLOP/s, 4,096 B/s, 1 s a launch.
DEVICE = toy_machine().device
INPUT, PARAMETER = LeafKind.INPUT, LeafKind.PARAMETER


def of_one(function):
    """The same function of the local sizes of one tiling."""
    return lambda work, sizes, device: function(work, np.array(sizes)[:, None], device).item()


forward_seconds = of_one(compute.forward_seconds)
backward_seconds = of_one(compute.backward_seconds)
operator_seconds = of_one(compute.operator_seconds)


def only(made, **leaves):
    """Workload and rule of a graph of one operator."""
    graph, _ = build(leaves, [made])
    return workload(graph.ops[0], made[1], graph), made[1]


def test_a_contraction_needs_two_flop_per_multiply_add_and_again_per_gradient():
    graph, analysis = linear_layer()
    work = workload(graph.ops[0], analysis.rules["y"], graph)
    assert work.kind is OperatorClass.MATMUL
    flop = 2 * 8 * 16 * 32
    assert forward_seconds(work, work.sizes, DEVICE) == flop / 1024 + 1
    assert backward_seconds(work, work.sizes, DEVICE) == flop / 1024 + 1  # only w: x is an input
    assert operator_seconds(work, work.sizes, DEVICE) == 18
    assert operator_seconds(work, (8, 16, 16), DEVICE) == 10  # n split in two


def test_both_operands_get_their_gradient_when_both_need_one():
    made = op("y", "mm", "ab", rule("m k, k n -> m n", work="m k n", m=8, k=16, n=32))
    work, _ = only(made, a=(PARAMETER, ((8,), (16,))), b=(PARAMETER, ((16,), (32,))))
    assert backward_seconds(work, work.sizes, DEVICE) == 2 * (8 + 1)


def test_a_bias_gets_its_gradient_by_a_memory_pass():
    found = rule("m k, n k, n -> m n", work="m n k", additive=[2], m=8, k=16, n=32)
    made = op("y", "linear", ["x", "w", "b"], found)
    leaves = {"x": (INPUT, ((8,), (16,))), "w": (PARAMETER, ((32,), (16,)))}
    work, _ = only(made, **leaves, b=(PARAMETER, ((32,),)))
    # Its kernel reads the result's gradient, 8 x 32 float32, and writes 32 float32.
    assert backward_seconds(work, work.sizes, DEVICE) == (8 + 1) + (1 + (1024 + 128) / 4096)


def test_a_pointwise_operator_is_bound_by_memory():
    graph, analysis = linear_layer()
    work = workload(graph.ops[1], analysis.rules["z"], graph)
    assert work.kind is OperatorClass.MEMORY
    assert forward_seconds(work, work.sizes, DEVICE) == 1 + 2 * 1024 / 4096
    # Reads the saved result and its gradient, writes the operand's.
    assert backward_seconds(work, work.sizes, DEVICE) == 1 + 3 * 1024 / 4096


def test_gradients_of_several_readers_are_added_up():
    leaves = {"w": (PARAMETER, ((8,), (32,)))}
    found = rule("a b -> a b", a=8, b=32)
    both = rule("a b, a b -> a b", a=8, b=32)
    ops = [op("y", "neg", ["w"], found), op("z", "neg", ["y"], found), op("s", "add", "yy", both)]
    graph, analysis = build(leaves, ops)
    three, one = (workload(made, analysis.rules[made.name], graph) for made in graph.ops[:2])
    assert (three.added, one.added) == ((2,), (0,))
    more = backward_seconds(three, three.sizes, DEVICE) - backward_seconds(one, one.sizes, DEVICE)
    assert more == 2 * (1 + 3 * 1024 / 4096)


def test_an_operator_without_gradient_has_no_backward():
    work, _ = only(op("y", "relu", ["x"], rule("a -> a", a=1024)), x=(INPUT, ((1024,),)))
    assert operator_seconds(work, work.sizes, DEVICE) == forward_seconds(work, work.sizes, DEVICE)


def test_the_launch_is_paid_however_small_the_work():
    work, _ = only(op("y", "relu", ["x"], rule("a -> a", a=0)), x=(INPUT, ((0,),)))
    assert operator_seconds(work, work.sizes, DEVICE) == 1


def test_attention_on_a_gpu_computes_whole_tiles_of_scores():
    ideal = replace(DEVICE, units=132, bytes_per_s=1e30, launch_seconds=0.0)

    def seconds(count, causal=False):
        found = rule("q d, k d, k d -> q d", work="q k d", q=count, k=count, d=16)
        made = op("y", "scaled_dot_product_attention", "qkv", found)
        work, _ = only(made, **dict.fromkeys("qkv", (PARAMETER, ((count,), (16,)))))
        work = replace(work, causal=(0,) if causal else ())
        return forward_seconds(work, work.sizes, ideal)

    assert seconds(197) == seconds(256) > seconds(128)
    assert seconds(1024, causal=True) == pytest.approx(seconds(1024) * (8 + 1) / (2 * 8))


@pytest.mark.parametrize("kind, again", [("softmax", False), ("log_softmax", True)])
def test_a_softmax_under_either_name_has_the_exponentials_of_its_passes(kind, again):
    """The logarithm's backward pass computes exponentials of what is saved."""
    for name in (kind, f"_{kind}"):
        made = op("y", name, ["x"], rule("a -> a", a=1024))
        work, _ = only(made, x=(PARAMETER, ((1024,),)))
        assert (work.kind, work.again) == (OperatorClass.FUNCTION, again)


def test_halves_of_a_causal_sequence_share_its_work_evenly():
    """Zigzag: each device has early and late queries. Else the last one's see more keys."""

    class Attention(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    made = capture_call(Attention(), (torch.ones(1, 2, 64, 16, requires_grad=True),)).graph
    attention = made.ops[0]
    found = analyze(made).rules[attention.name]
    work, names = workload(attention, found, made), [factor.name for factor in found.factors]
    whole = {factor.name: factor.size for factor in found.factors}

    def flop(**local):
        sizes = np.array([{**whole, **local}[name] for name in names])
        return compute.contraction_flop(work, sizes[:, None]).item()

    assert flop() == 2 * 2 * 64 * 64 * 16 / 2
    assert flop(l=32) == flop() * 3 / 4
    assert flop(l=32, z=32) == flop() / 2


def test_attention_multiplies_twice_forward_and_five_times_backward():
    found = rule("q d, k d, k d -> q d", work="q k d", q=16, k=16, d=16)
    made = op("y", "scaled_dot_product_attention", "qkv", found)
    work, _ = only(made, **dict.fromkeys("qkv", (PARAMETER, ((16,), (16,)))))
    flop = 2 * 16**3
    assert forward_seconds(work, work.sizes, DEVICE) == 2 * flop / 1024 + 1
    assert backward_seconds(work, work.sizes, DEVICE) == 5 * flop / 1024 + 1


def test_a_lookup_reads_the_rows_it_returns_and_writes_the_whole_gradient():
    made = op("y", "embedding", ["w", "i"], rule("v d, b -> b d", v=1024, d=4, b=16))
    work, _ = only(made, w=(PARAMETER, ((1024,), (4,))), i=(INPUT, ((16,),)))
    rows, table = 16 * 4 * 4, 1024 * 4 * 4
    assert forward_seconds(work, work.sizes, DEVICE) < 1 + 4 * rows / 4096
    assert backward_seconds(work, work.sizes, DEVICE) == 1 + (rows + table) / 4096


def views():
    leaves = {"w": (PARAMETER, ((8,), (4,)))}
    ops = [
        op("flat", "view", ["w"], rule("a b -> (a b)", a=8, b=4)),
        op("part", "slice", ["flat"], rule("c -> d", whole="c d", c=32, d=8)),
    ]
    return build(leaves, ops, aliases={"flat": "w", "part": "flat"})


def test_a_view_costs_nothing_and_taking_a_part_costs_its_backward():
    graph, analysis = views()
    flat, part = (workload(op, analysis.rules[op.name], graph) for op in graph.ops)
    assert operator_seconds(flat, flat.sizes, DEVICE) == 0
    assert forward_seconds(part, part.sizes, DEVICE) == 0
    assert backward_seconds(part, part.sizes, DEVICE) == 1 + (8 + 32) * 4 / 4096


@pytest.mark.parametrize(
    "kind, class_, seconds",
    [("mm", "matmul", 16), ("convolution", "convolution", 32), ("conv2d", "convolution", 32)],
)
def test_each_class_reaches_its_own_part_of_the_peak(kind, class_, seconds):
    found = rule("m k, k n -> m n", work="m k n", m=8, k=16, n=32)
    work, _ = only(op("y", kind, "ab", found), a=(INPUT, ((8,), (16,))), b=(INPUT, ((16,), (32,))))
    assert work.kind is OperatorClass(class_)
    device = toy_machine().device
    slow = type(device)(
        device.kind,
        device.memory_bytes,
        device.flop_per_s,
        device.bytes_per_s,
        device.launch_seconds,
        Efficiency(matmul=0.5, convolution=0.25),
    )
    assert forward_seconds(work, work.sizes, slow) == seconds + 1


@pytest.mark.parametrize(
    "kind, forward, backward",
    [("relu", 1, 1), ("gelu", 4, 4), ("tanh", 4, 1), ("max_pool2d", 8, 1)],
)
def test_what_computes_more_than_it_moves_has_parts_of_its_own(kind, forward, backward):
    found = rule("m k -> m k", m=8, k=16)
    work, _ = only(op("y", kind, "a", found), a=(PARAMETER, ((8,), (16,))))
    device = replace(DEVICE, efficiency=Efficiency(functions=0.25, pooling=0.125))
    moved = 2 * 8 * 16 * 4 / 4096
    assert forward_seconds(work, work.sizes, device) == 1 + forward * moved
    assert backward_seconds(work, work.sizes, device) == 1 + backward * moved
    assert forward_seconds(work, work.sizes, DEVICE) == 1 + moved  # where none was measured


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from("mkn"),
    st.sampled_from(["mm", "relu", "embedding", "scaled_dot_product_attention"]),
    st.booleans(),
)
def test_splitting_never_increases_an_operators_seconds(m, k, n, factor, kind, frozen):
    found = rule("m k, k n -> m n", work="" if kind == "relu" else "m k n", m=m, k=k, n=n)
    made = op("y", kind, "ab", found, saves=("a", "y"))
    first = INPUT if frozen else PARAMETER
    work, _ = only(made, a=(first, ((m,), (k,))), b=(PARAMETER, ((k,), (n,))))
    mesh = Mesh.parse("dp=2 tp=3")
    whole = operator_seconds(work, local_sizes(found, (None, None), mesh), DEVICE)
    split = operator_seconds(work, local_sizes(found, (None, Split(factor)), mesh), DEVICE)
    twice = operator_seconds(work, local_sizes(found, (Split(factor),) * 2, mesh), DEVICE)
    assert twice <= split <= whole


def cross_entropy():
    """Logits of 64 samples and 32 classes; the maximum and the sum of a sample are agreed on."""
    found = replace(
        rule("n c, n ->", linear=[{0}], n=64, c=32),
        internal_reductions=((("n",),),) * 2,
    )
    leaves = {"w": (PARAMETER, ((64,), (32,))), "t": (INPUT, ((64,),))}
    work, _ = only(op("loss", "cross_entropy_loss", ["w", "t"], found), **leaves)
    return work


def test_a_cross_entropy_of_split_classes_is_computed_term_by_term():
    work = cross_entropy()
    for seconds in (forward_seconds, backward_seconds):
        halves = seconds(work, (32, 32), DEVICE), seconds(work, (64, 16), DEVICE)
        whole = seconds(replace(work, internal_reductions=()), (64, 16), DEVICE)
        assert halves[1] == 2 * whole
        assert halves[0] < halves[1] < 2.1 * halves[0]


def test_a_timing_at_the_size_of_a_tile_of_classes_is_of_the_fused_operator():
    tensors = ((((0,), (1,)), "float32", True), (((0,),), "int64", False))
    form = UnsizedCall("aten.cross_entropy_loss.default", (Ref("0"), Ref("1")), (), tensors)
    work = replace(cross_entropy(), form=form)
    tile = str(form.at([64, 16]))
    known = replace(DEVICE, timings=(Timing(tile, 3.0, 5.0),))
    assert forward_seconds(work, (64, 16), known) == 2 * 3.0
    assert backward_seconds(work, (64, 16), known) == 2 * 5.0
