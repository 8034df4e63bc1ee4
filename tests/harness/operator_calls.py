"""One call, at least, of every operator that has a written rule, as a graph of that call alone.

Sizes are odd, so that tiles are uneven, and differ, so that no dimension passes for another.
"""

from dataclasses import dataclass

import torch
from transformers.integrations import moe as moe  # registers its grouped products

from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Ref, Symbol, Tensor
from shardwright.tracing.decompose.tables import ctc as ctc  # registers its operator
from shardwright.tracing.export.operators import operator_of
from shardwright.tracing.values import selection as selection  # registers its operators
from tests.harness.drawn_tensors import b, f, i, infinite, recurrent, u, z


@dataclass(frozen=True)
class OneOp:
    """A graph of one operator, with values for its leaves and what they give."""

    name: str
    graph: Graph
    values: dict[str, torch.Tensor]
    results: tuple[torch.Tensor, ...]

    @property
    def op(self):
        return self.graph.ops[0]


def call(target, *args, **kwargs):
    """The graph of `torch.ops.aten.<target>(*args, **kwargs)`, or of another named namespace."""
    values = {}

    def named(arg):
        if isinstance(arg, torch.Tensor):
            found = [name for name, value in values.items() if value is arg]
            name = found[0] if found else f"x{len(values)}"
            values[name] = arg
            return Ref(name)
        if isinstance(arg, list | tuple):
            return tuple(named(a) for a in arg)
        if isinstance(arg, torch.dtype):
            return Symbol("dtype", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Symbol("device", "here")
        return arg

    packed = tuple(named(arg) for arg in args)
    pairs = tuple((key, named(arg)) for key, arg in kwargs.items())
    if target == "shardwright.dropout.default":
        results, outputs = (args[0].clone(),), ("y",)
    else:
        target = target if target.count(".") == 2 else f"aten.{target}"
        results = operator_of(target)(*args, **kwargs)
        single = isinstance(results, torch.Tensor)
        results = (results,) if single else tuple(results)
        outputs = ("y",) if single else tuple(f"y.{k}" for k in range(len(results)))
    op = Op("y", target, packed, pairs, outputs)
    described = [*values.items(), *zip(outputs, results, strict=True)]
    graph = Graph(
        leaves=tuple(Leaf(name, LeafKind.BUFFER, (name,)) for name in values),
        ops=(op,),
        outputs=outputs,
        values=tuple(
            Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
            for name, t in described
        ),
    )
    return OneOp(str(op), graph, values, results)


def _names(text):
    return text.split()


UNARY = _names("""
    abs ceil celu cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish hardtanh
    isfinite isinf isnan leaky_relu mish reciprocal relu relu6 round selu sigmoid sign silu sin
    sinh softplus square tan tanh trunc zeros_like ones_like alias clone contiguous neg positive
    detach log_sigmoid _to_copy acos asin atan log log10 log1p log2 rsqrt sqrt logit
""")
BINARY = _names("atan2.default copysign.Tensor maximum.default minimum.default")
COMPARISONS = _names("eq ge gt le lt ne")
WHOLE_NUMBERS = _names("bitwise_and bitwise_or bitwise_xor fmod remainder")
BOOLEAN = _names("logical_and logical_or logical_xor")

GATED = (
    '[["part", [{"value": 0}, 0, 2], {}], ["part", [{"value": 0}, 1, 2], {}],'
    ' ["aten.silu.default", [{"value": 1}], {}],'
    ' ["aten.mul.Tensor", [{"value": 3}, {"value": 2}], {}]]'
)

INTERLEAVED = GATED.replace('"part"', '"every"')

GATED_MLP = (
    '[["aten.silu.default", [{"value": 0}], {}],'
    ' ["aten.mul.Tensor", [{"value": 2}, {"value": 1}], {}]]'
)

CALLS = [
    *(call(f"{kind}.default", u(5, 7)) for kind in UNARY),
    *(call(target, f(5, 1, 7), f(6, 1)) for target in BINARY),
    *(call(f"{kind}.Tensor", i(5, 7, below=3), i(7, below=3)) for kind in COMPARISONS),
    *(call(f"{kind}.Scalar", f(5, 7), 0.0) for kind in COMPARISONS),
    *(call(f"{kind}.Tensor", i(5, 7), i(5, 1) + 1) for kind in WHOLE_NUMBERS),
    *(call(f"{kind}.default", b(5, 7), b(7)) for kind in BOOLEAN),
    # Elementwise
    call("floor_divide.default", i(5, 7), i(5, 1) + 1),
    call("bitwise_not.default", b(5, 7)),
    call("logical_not.default", b(5, 7)),
    call("clamp.default", f(5, 7), -0.5, 0.5),
    call("clamp.Tensor", f(5, 7), u(7), None),
    call("clamp_max.default", f(5, 7), 0.5),
    call("clamp_min.default", f(5, 7), 0.5),
    call("fill.Scalar", f(5, 7), 2.0),
    call("full_like.default", f(5, 7), 2.0),
    call("masked_fill.Scalar", f(5, 6, 7), b(6, 1), -1.0),
    call("pow.Tensor_Scalar", f(5, 7), 3),
    call("pow.Scalar", 2.0, f(5, 7)),
    call("pow.Tensor_Tensor", u(5, 7), f(7)),
    call("rsub.Scalar", f(5, 7), 1.0),
    call("threshold.default", f(5, 7), 0.1, 0.2),
    call("_to_copy.default", f(5, 7), dtype=torch.float32),
    call("gelu.default", f(5, 7), approximate="tanh"),
    call("add.Tensor", f(5, 7), f(7)),
    call("add.Tensor", f(5, 7), f(5, 7), alpha=2.0),
    call("add.Tensor", f(5, 7), i(5, 7)),
    call("add.Tensor", f(5, 7), 1.0),
    call("sub.Tensor", f(5, 1, 7), f(6, 1)),
    call("mul.Tensor", f(5, 7), f(7)),
    call("mul.Tensor", *[f(5, 7)] * 2),
    call("mul.Tensor", f(5, 7), i(5, 7)),
    call("div.Tensor", f(5, 7), u(5, 1)),
    call("div.Tensor", i(5, 7), i(5, 1) + 1),
    call("div.Tensor_mode", f(5, 7), u(7), rounding_mode="floor"),
    call("where.self", b(5, 7), f(7), f(5, 1)),
    call("where.ScalarSelf", b(5, 7), 1.0, f(5, 7)),
    call("where.ScalarOther", b(5, 7), f(5, 7), 1.0),
    call("shardwright.dropout.default", f(5, 6, 7), 0.5, 2),
    # Tensors made of nothing
    call("full.default", [5, 7], 2.0),
    call("zeros.default", [5, 7]),
    call("ones.default", [5, 7]),
    call("empty.memory_format", [5, 7]),
    call("scalar_tensor.default", 2.0),
    call("arange.default", 7),
    call("new_zeros.default", f(5, 7), [6, 9]),
    call("new_empty.default", f(5, 7), [6, 9]),
    call("new_ones.default", f(5, 7), [6, 9]),
    call("new_full.default", f(5, 7), [6, 9], 3.0),
    # Views
    call("view.default", f(5, 6, 7), [5, 42]),
    call("view.default", f(30, 7), [5, 6, 7]),
    call("view.default", f(6, 35), [42, 5]),
    call("view.default", f(6, 7), [3, 14]),
    call("view.default", f(6, 7), [1, 2, 21]),
    call("_unsafe_view.default", f(5, 6, 7), [30, 7]),
    call("reshape.default", f(5, 6, 7), [5, -1]),
    call("flatten.using_ints", f(5, 6, 7), 1, 2),
    call("unflatten.int", f(5, 42), 1, [6, 7]),
    call("squeeze.default", f(5, 1, 7)),
    call("squeeze.dims", f(5, 1, 7), [1]),
    call("view_as_complex.default", f(5, 7, 2)),
    call("view_as_real.default", z(5, 7)),
    call("unsqueeze.default", f(5, 7), 1),
    call("unsqueeze.default", b(5, 7), -1),
    call("permute.default", f(5, 6, 7), [2, 0, 1]),
    call("transpose.int", f(5, 6, 7), -1, 1),
    call("t.default", f(5, 7)),
    call("t.default", f(7)),
    call("expand.default", f(5, 1, 7), [6, 5, 6, -1]),
    call("broadcast_tensors.default", [f(5, 7), f(6, 1, 7)]),
    call("slice.Tensor", f(12, 5), 0, 4, 8),
    call("slice.Tensor", f(5, 12), 1, -6, 9223372036854775807),
    call("slice.Tensor", f(5, 12), -1, None, 6),
    call("slice.Tensor", f(5, 7), 0, 0, 9223372036854775807),
    call("slice.Tensor", f(5, 7), 1, 1, 6),
    call("slice.Tensor", f(5, 8), 1, 0, 8, 2),
    call("slice.Tensor", f(5, 7), 1, -9),
    call("split.Tensor", f(5, 12), 6, 1),
    call("split.Tensor", f(11, 5), 4),
    call("split_with_sizes.default", f(5, 18), [6, 12], -1),
    call("chunk.default", f(5, 14), 2, 1),
    call("chunk.default", f(5, 11), 3, -1),
    call("unbind.int", f(5, 3, 7), 1),
    call("select.int", f(5, 6, 7), 1, -2),
    call("pad.default", f(5, 2, 7), [1, 2]),
    call("constant_pad_nd.default", f(5, 6, 7), [1, 2, 0, 1], 3.0),
    call("cat.default", [f(5, 7), f(5, 7)], 1),
    call("cat.default", [f(5, 7), f(5, 6)], -1),
    call("cat.default", [f(5, 7), f(3, 7)]),
    call("cat.default", [f(5, 1), f(5, 1), f(5, 1)], 1),
    call("stack.default", [f(5, 7), f(5, 7), f(5, 7)], 1),
    call("stack.default", [f(5, 7), f(5, 7)], -1),
    call("repeat.default", f(5, 7), [3, 1, 2]),
    # Contractions
    call("linear.default", f(5, 6, 7), f(9, 7), f(9)),
    call("linear.default", f(7), f(9, 7)),
    call("mm.default", f(5, 7), f(7, 6)),
    call("bmm.default", f(5, 6, 7), f(5, 7, 9)),
    call("mv.default", f(5, 7), f(7)),
    call("dot.default", f(7), f(7)),
    call("addmm.default", f(6), f(5, 7), f(7, 6)),
    call("addmm.default", f(5, 6), f(5, 7), f(7, 6), beta=2.0, alpha=3.0),
    call("baddbmm.default", f(6, 9), f(5, 6, 7), f(5, 7, 9)),
    call("matmul.default", f(5, 7), f(7, 6)),
    call("matmul.default", f(5, 1, 6, 7), f(3, 7, 9)),
    call("matmul.default", f(7), f(5, 7, 9)),
    call("matmul.default", f(5, 6, 7), f(7)),
    call("embedding.default", f(11, 7), i(5, 6)),
    call("embedding.default", f(11, 7), i(5, 6), 3),
    call("embedding.default", f(11, 7), i(5, 6), -1, True),
    call("embedding.default", f(7, 6), i(5, 6, below=7), 2, True),
    *(
        call("shardwright.embedding_bags.default", f(11, 7), i(5, 6), *rest)
        for rest in (
            (None, None, 0, -1, False, False, []),
            (None, None, 1, 3, False, False, []),
            (None, None, 2, 3, False, False, []),
            (None, None, 1, 3, False, True, []),
            (None, f(5, 6), 0, 3, False, False, []),
        )
    ),
    *(
        call("shardwright.embedding_bags.default", f(11, 7), i(6), *rest)
        for rest in (
            (torch.tensor([0, 2, 2]), None, 1, 3, False, False, []),
            (torch.tensor([0, 2, 5, 6]), f(6), 0, -1, True, False, []),
            (torch.tensor([0, 4]), None, 2, -1, False, False, []),
        )
    ),
    call("conv1d.default", f(5, 6, 11), f(9, 6, 3), f(9), [2], [1]),
    call("conv2d.default", f(3, 6, 7, 5), f(9, 6, 3, 3), f(9)),
    call("conv2d.default", f(3, 6, 7, 5), f(9, 2, 3, 3), f(9), [1, 1], [1, 1], [1, 1], 3),
    call("conv2d.default", f(3, 6, 7, 5), f(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 6),
    call("conv2d.padding", f(3, 6, 7, 5), f(9, 6, 3, 3), f(9), [1, 1], "same"),
    call("conv3d.default", f(3, 5, 5, 4, 3), f(7, 5, 2, 2, 2), f(7)),
    call("scaled_dot_product_attention.default", f(5, 3, 7, 4), f(5, 3, 6, 4), f(5, 3, 6, 9)),
    call(
        "scaled_dot_product_attention.default",
        f(5, 3, 7, 4), f(5, 3, 7, 4), f(5, 3, 7, 4), None, 0.0, True,
    ),
    call(
        "scaled_dot_product_attention.default",
        f(2, 6, 9, 4), f(2, 3, 9, 4), f(2, 3, 9, 5), None, 0.0, True, enable_gqa=True,
    ),
    call(
        "scaled_dot_product_attention.default",
        f(5, 3, 7, 4), f(5, 3, 6, 4), f(5, 3, 6, 4), f(5, 1, 7, 6), scale=0.3,
    ),
    call(
        "scaled_dot_product_attention.default",
        f(5, 4, 7, 4), f(5, 2, 6, 4), f(5, 2, 6, 4), b(5, 1, 1, 6), enable_gqa=True,
    ),
    call(
        "scaled_dot_product_attention.default",
        f(5, 6, 7, 4), f(5, 3, 6, 4), f(5, 3, 6, 4), None, 0.0, False, enable_gqa=True,
    ),
    call(
        "scaled_dot_product_attention.default",
        f(5, 6, 7, 4), f(5, 3, 6, 4), f(5, 3, 6, 4), f(7, 6), 0.0, False, enable_gqa=True,
    ),
    call("scaled_dot_product_attention.default", f(3, 2, 4), f(3, 2, 4), f(3, 2, 4), None, 0, True),
    # Reductions, norms and losses
    call("sum.default", f(5, 7)),
    call("sum.dim_IntList", f(5, 6, 7), [0, -1]),
    call("sum.dim_IntList", f(5, 6, 7), [1], True),
    call("sum.dim_IntList", f(5, 6, 7), [0], dtype=torch.float32),
    call("sum.default", b(5, 7)),
    call("sum.default", f(7)),
    call("mean.default", f(5, 7)),
    call("mean.dim", f(5, 6, 7), [1], True),
    call("prod.dim_int", u(5, 7), 1),
    call("prod.default", u(5, 7)),
    call("prod.default", (u(5, 7) * (u(5, 7) > 0.15)).detach().requires_grad_()),
    call("prod.dim_int", f(5, 7).detach().clamp(min=0).requires_grad_(), 0, True),
    call("amax.default", f(5, 6, 7), [1]),
    call("amax.default", f(5, 7).detach().round().requires_grad_(), [], True),
    call("amin.default", f(5, 6, 7), [0, -1]),
    call("amin.default", f(5, 6, 7), [-1], True),
    call("all.dim", b(5, 7), 1),
    call("any.default", b(5, 7)),
    call("argmax.default", f(5, 7), 1),
    call("argmax.default", f(5, 7)),
    call("argmin.default", f(5, 7), 0),
    call("logsumexp.default", f(5, 7), [1]),
    call("logsumexp.default", infinite(5, 7), [0]),
    call("amax.default", infinite(5, 7), [0, 1]),
    call("amin.default", infinite(5, 7)),
    call("max.dim", f(5, 7), 1),
    call("max.default", f(5, 7)),
    call("min.default", f(5, 7).detach().relu().requires_grad_()),
    call("logsumexp.default", f(5, 6, 7), [0, 1, 2], True),
    call("min.dim", f(5, 7), -1, True),
    call("std.correction", f(5, 7), [1]),
    call("var.correction", f(5, 7), [0], correction=0, keepdim=True),
    call("var_mean.correction", f(5, 7), [1]),
    call("std_mean.correction", f(5, 7), [1]),
    call("softmax.int", f(5, 6, 7), 1),
    call("_softmax.default", f(5, 6, 7), -1, False),
    call("log_softmax.int", f(5, 6, 7), -1),
    call("_log_softmax.default", f(5, 6, 7), 0, False),
    call("cumsum.default", f(5, 7), 0),
    call("cumprod.default", f(5, 7), 1),
    call("flip.default", f(5, 6, 7), [0, 2]),
    call("roll.default", f(5, 6, 7), [2], [1]),
    call("roll.default", f(5, 6), [2]),
    call("roll.default", f(5, 6), [2], dims=[-1]),
    call("sort.default", f(5, 7), 0),
    call("argsort.default", f(5, 7), 0),
    call("layer_norm.default", f(5, 6, 7), [7], f(7), f(7)),
    call("layer_norm.default", f(5, 6, 7), [6, 7]),
    call("rms_norm.default", f(5, 6, 7), [7], f(7)),
    call("cross_entropy_loss.default", f(5, 7), i(5, below=7), None, 2, 3),
    call("cross_entropy_loss.default", f(5, 7), i(5, below=7), u(7).detach(), 2, -100, 0.1),
    call("cross_entropy_loss.default", f(5, 7, 3), i(5, 3, below=7), None, 0),
    call("cross_entropy_loss.default", f(5, 7), u(5, 7), None, 2),
    call("cross_entropy_loss.default", f(5, 7), u(5, 7), u(7).detach(), 2, -100, 0.2),
    call("cross_entropy_loss.default", f(7), i(below=7), None, 2),
    call("shardwright.cross_entropy_loss.default", f(5, 7), i(5, below=7), None, 2, 3),
    call("shardwright.cross_entropy_loss.default", f(5, 7), i(5, below=7), None, 0),
    call("shardwright.linear_cross_entropy.default",
         f(5, 6), f(7, 6), f(7), i(5, below=7), u(7).detach(), -100, 0.1, 3, torch.float64),
    call("shardwright.chunked_mlp.default", f(5, 3, 6), [f(7, 6), f(7, 6)], [None, None],
         f(6, 7), None, [True, True, True], 4, GATED_MLP),
    call("shardwright.chunked_mlp.default", f(5, 6), [f(6, 7)], [f(7)], f(7, 6), f(6),
         [False, False], 2, '[["aten.gelu.default", [{"value": 0}], {}]]'),
    call("shardwright.chunked_mlp.default", f(5, 6), [f(14, 6)], [f(14)], f(6, 7), None,
         [True, True], 2, GATED),
    call("nll_loss_nd.default", f(5, 7), i(5, below=7), None, 2, -100),
    call("nll_loss_nd.default", f(5, 7, 3), i(5, 3, below=7), u(7).detach(), 2, 3),
    call("mse_loss.default", f(5, 7), f(5, 7), 2),
    call("mse_loss.default", f(5, 7), f(5, 7), 0),
    call("l1_loss.default", f(5, 1), f(5, 7), 2),
    call("l1_loss.default", f(5, 7), f(5, 7), 2),
    call("smooth_l1_loss.default", f(5, 7), f(5, 7), 2),
    call("huber_loss.default", f(5, 7), f(5, 7), 2, 0.5),
    call("binary_cross_entropy.default", u(5, 7), u(5, 7), None, 2),
    call("binary_cross_entropy.default", u(5, 7), u(5, 7), u(7).detach(), 2),
    call(
        "binary_cross_entropy_with_logits.default",
        f(5, 7), u(5, 7), u(5, 1).detach(), u(7).detach(), 2,
    ),
    # Pools
    call("max_pool1d.default", f(5, 3, 8), [2]),
    call("max_pool2d.default", f(5, 3, 8, 6), [2, 2]),
    call("max_pool2d.default", f(3, 8, 6), [3, 3], [2, 2], [1, 1]),
    call("max_pool3d.default", f(5, 3, 4, 4, 4), [2, 2, 2]),
    call("avg_pool1d.default", f(5, 3, 8), [2]),
    call("avg_pool2d.default", f(5, 3, 8, 6), [2, 2]),
    call("avg_pool3d.default", f(5, 3, 4, 4, 4), [2, 2, 2]),
    call("adaptive_avg_pool1d.default", f(5, 3, 8), [3]),
    call("adaptive_avg_pool2d.default", f(5, 3, 8, 6), [3, 1]),
    call("adaptive_avg_pool3d.default", f(5, 3, 4, 4, 4), [2, 2, 2]),
    call("_adaptive_avg_pool2d.default", f(5, 3, 8, 6), [3, 2]),
    call("upsample_nearest2d.default", f(5, 3, 4, 3), [8, 6]),
    call("upsample_bilinear2d.default", f(5, 3, 4, 3), [8, 6], True),
    call("max_pool2d_with_indices.default", f(5, 3, 8, 6), [2, 2]),
    call("adaptive_max_pool1d.default", f(5, 3, 8), [3]),
    call("adaptive_max_pool2d.default", f(5, 3, 8, 6), [3, 2]),
    call("upsample_nearest1d.default", f(5, 3, 4), [8]),
    call("upsample_linear1d.default", f(5, 3, 4), [8], True),
    call("upsample_bicubic2d.default", f(5, 3, 4, 3), [8, 6], True),
    call("upsample_nearest3d.default", f(5, 3, 2, 2, 3), [4, 4, 6]),
    call("upsample_trilinear3d.default", f(5, 3, 2, 2, 3), [4, 4, 6], True),
    # Norms over the batch and over groups
    call("shardwright.moments.default", f(5, 3, 4, 2), 0.5),
    call("shardwright.moments.default", f(5, 3), 0.5),
    call("shardwright.statistics.default", f(2, 3).detach(), 5, torch.float64),
    call("shardwright.standardize.default", f(5, 3, 4), u(2, 3), f(3), f(3), 1e-3),
    call("shardwright.standardize.default", f(5, 3, 4, 2), u(2, 3), None, None, 1e-3),
    call("shardwright.normalize.default", f(5, 3, 4), f(3), u(3), f(3), f(3), 1e-3),
    call("shardwright.normalize.default", f(5, 3, 4, 2), f(3), u(3), None, None, 1e-3),
    call("group_norm.default", f(5, 6, 4), 3, f(6), f(6)),
    call("group_norm.default", f(5, 6, 4, 2), 6),
    call("group_norm.default", f(5, 6, 4, 2), 1),
    # Elementwise, less often met
    call("__and__.Tensor", b(5, 7), b(7)),
    call("__or__.Tensor", b(5, 7), b(7)),
    call("__xor__.Tensor", b(5, 7), b(7)),
    call("empty_like.default", f(5, 7)),
    call("lerp.Scalar", f(5, 7), f(5, 7), 0.1),
    call("lerp.Tensor", f(5, 7), f(5, 7), u(7)),
    call("addcmul.default", f(5, 7), f(5, 1), f(7), value=2.0),
    call("addcdiv.default", f(5, 7), f(5, 1), u(7)),
    call("xlogy.Tensor", f(5, 7), u(7)),
    call("erfinv.default", u(5, 7)),
    call("lgamma.default", u(5, 7)),
    call("digamma.default", u(5, 7)),
    call("logaddexp.default", f(5, 7), f(5, 1)),
    call("nan_to_num.default", f(5, 7)),
    call("softshrink.default", f(5, 7)),
    call("hardshrink.default", f(5, 7)),
    call("prelu.default", f(5, 6, 3), u(6)),
    call("prelu.default", f(5, 6), u(1)),
    call("min.other", f(5, 7), f(7)),
    call("max.other", f(5, 7), f(7)),
    call("tril.default", f(5, 6, 7), -1),
    call("triu.default", f(5, 6, 7)),
    call("linspace.default", 0.0, 1.0, 7),
    call("eye.m", 5, 7),
    call("shardwright.local_batch_norm.default", f(5, 3, 4, 2), f(3), f(3), 1.0, 1e-3, []),
    call("shardwright.local_batch_norm.default", f(7, 3, 4), None, None, 1.0, 1e-3, []),
    call("shardwright.uniform.default", [5, 7], 3, dtype=torch.float64, device=torch.device("cpu")),
    # Rearranged
    call("repeat_interleave.self_int", f(5, 6), 3, 1),
    call("pixel_shuffle.default", f(5, 12, 3, 2), 2),
    call("glu.default", f(5, 6)),
    # Looked up
    call("index.Tensor", f(5, 6, 7), [i(4, below=5)]),
    call("index.Tensor", f(5, 6, 7), [None, i(4, 3, below=6)]),
    call("index.Tensor", f(5, 6, 7), [i(4, 1, below=5), i(3, below=6)]),
    call("index.Tensor", f(5, 6, 7), [i(4, below=5), None, i(4, below=7)]),
    call("index_put.default", f(5, 6, 7), [i(4, below=5)], f(4, 6, 7), True),
    call("index_put.default", f(5, 6, 7), [None, i(4, below=6)], f(4, 7), True),
    call("index_select.default", f(5, 6, 7), 1, i(4, below=6)),
    call("gather.default", f(5, 6, 7), 1, i(5, 4, 7, below=6)),
    call("gather.default", f(5, 6, 7), 1, i(3, 4, 7, below=6)),
    call("scatter.src", f(5, 6), 1, torch.arange(20).view(5, 4) % 5, f(5, 4)),
    call("scatter.value", f(5, 6), 0, i(3, 6, below=5), 2.0),
    call("scatter_add.default", f(5, 6), 0, i(4, 6, below=5), f(4, 6)),
    call("topk.default", f(5, 6, 7), 3),
    call("topk.default", f(5, 6, 7), 2, 1),
    call("slice_scatter.default", f(5, 6), f(5, 2), 1, 3, 5),
    call("select_scatter.default", f(5, 6), f(5), 1, 2),
    call("histc.default", u(9).detach(), 4, 0, 1),
    # Products, less often met
    call("conv_transpose1d.default", f(5, 4, 6), f(4, 3, 2), f(3), [2]),
    call("conv_transpose2d.input", f(5, 4, 3, 3), f(4, 3, 2, 2), f(3), [2, 2]),
    call("conv_transpose2d.input",
         f(5, 4, 3, 3), f(4, 3, 2, 2), f(6), [2, 2], [0, 0], [0, 0], 2),
    call("conv_transpose3d.input", f(5, 4, 2, 2, 2), f(4, 3, 2, 2, 2)),
    call("bilinear.default", f(5, 6, 3), f(5, 6, 4), f(7, 3, 4), f(7)),
    call("transformers.grouped_mm_fallback.default",
         f(9, 6), f(3, 6, 5), torch.tensor([2, 7, 9], dtype=torch.int32)),
    call("_grouped_mm.default",
         f(9, 48).float().detach(), f(3, 48, 64).float().detach(),
         torch.tensor([2, 7, 9], dtype=torch.int32)),
    call("_grouped_mm.default",
         f(9, 20).float().detach(), f(3, 20, 64).float().detach(),
         torch.tensor([2, 7, 9], dtype=torch.int32)),
    call("shardwright.experts.default",
         f(9, 6), i(9, 2, below=5), u(9, 2), f(5, 14, 6), f(5, 6, 7), [True, True],
         "transformers.grouped_mm_fallback.default", GATED),
    call("shardwright.experts.default",  # of the experts only the first two are ever chosen
         f(9, 6), i(9, 1, below=2), u(9, 1), f(5, 6, 7), f(5, 7, 6), [False, False],
         "transformers.grouped_mm_fallback.default", '[["aten.tanh.default", [{"value": 0}], {}]]'),
    call("shardwright.experts.default",
         f(9, 6), i(9, 2, below=5), u(9, 2), f(5, 6, 14), f(5, 7, 6), [False, False],
         "transformers.grouped_mm_fallback.default", INTERLEAVED, f(5, 14), f(5, 6)),
    call("shardwright.experts.default",  # whose scores scale the input of the second product
         f(9, 6), i(9, 2, below=5), u(9, 2), f(5, 8, 6), f(5, 6, 4), [True, True],
         "transformers.grouped_mm_fallback.default", GATED, None, f(5, 6)),
    # Recurrent layers
    call("lstm.input",
         f(6, 5, 3), [f(1, 5, 4), f(1, 5, 4)], recurrent(4), True, 1, 0.0, True, False, False),
    call("lstm.input",
         f(5, 6, 3), [f(4, 5, 4), f(4, 5, 4)], recurrent(4, layers=2, directions=2, biases=False),
         False, 2, 0.0, True, True, True),
    call("gru.input", f(6, 5, 3), f(1, 5, 4), recurrent(3), True, 1, 0.0, True, False, False),
    call("rnn_tanh.input", f(6, 5, 3), f(1, 5, 4), recurrent(1), True, 1, 0.0, True, False, False),
    call("rnn_relu.input", f(5, 6, 3), f(1, 5, 4), recurrent(1), True, 1, 0.0, True, False, True),
]  # fmt: skip

MARKED = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
SELECTIONS = (
    call("shardwright.positions.default", MARKED, 7),
    call("shardwright.placements.default", MARKED, 7),
    call("shardwright.all_true.default", torch.ones(5, 7, dtype=torch.bool)),
    call("shardwright.replaced.default", f(5, 7), f(5, 7).detach()),
    call("shardwright.expected.default", torch.tensor(True), True, "model.py:1", False),
    *(call(f"_is_{some}_true.default", b(5, 7)) for some in ("all", "any")),
    call("shardwright.ctc_losses.default", f(7, 3, 5).log_softmax(-1).detach().requires_grad_(),
         1 + i(3, 2, below=4), torch.tensor([7, 6, 5]), torch.tensor([2, 1, 2]), 0, False),
)  # fmt: skip
CALLS += SELECTIONS
