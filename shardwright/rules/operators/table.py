"""The table of written rules, in index notation.

To add an operator, add a line to `TEXT` if its notation is fixed, or its name to one of the lists
of elementwise operators, or a function and a line to `BUILDERS` if the notation depends on
arguments. If sizes are among its arguments, `arguments.py` must make them local.
"""

from __future__ import annotations

from shardwright.rules.call import Builder
from shardwright.rules.operators import (
    contractions,
    indexing,
    pointwise,
    reductions,
    views,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NAMESPACES = ("aten", "shardwright", "transformers")  # whose operators the tables name

# `kind -> (notation, indices of the multiply-adds)`
TEXT: dict[str, tuple[str, str]] = {
    "linear": ("... k, n k, +n -> ... n", "... k n"),
    "mm": ("m k, k n -> m n", "m k n"),
    "bmm": ("b m k, b k n -> b m n", "b m k n"),
    "mv": ("m k, k -> m", "m k"),
    "dot": ("k, k -> ", "k"),
    "max_pool1d": ("... x! -> ... p!", ""),
    "max_pool2d": ("... y! x! -> ... q! p!", ""),
    "max_pool3d": ("... z! y! x! -> ... r! q! p!", ""),
    "avg_pool1d": ("... x! -> ... p!", ""),
    "avg_pool2d": ("... y! x! -> ... q! p!", ""),
    "avg_pool3d": ("... z! y! x! -> ... r! q! p!", ""),
    "adaptive_avg_pool1d": ("... x! -> ... p!", ""),
    "adaptive_avg_pool2d": ("... y! x! -> ... q! p!", ""),
    "adaptive_avg_pool3d": ("... z! y! x! -> ... r! q! p!", ""),
    "_adaptive_avg_pool2d": ("... y! x! -> ... q! p!", ""),
    "max_pool2d_with_indices": ("... y! x! -> ... q! p!, ... q! p!", ""),
    "adaptive_max_pool1d": ("... x! -> ... p!, ... p!", ""),
    "adaptive_max_pool2d": ("... y! x! -> ... q! p!, ... q! p!", ""),
    "upsample_nearest1d": ("... x! -> ... p!", ""),
    "upsample_linear1d": ("... x! -> ... p!", ""),
    "upsample_nearest2d": ("... y! x! -> ... q! p!", ""),
    "upsample_bilinear2d": ("... y! x! -> ... q! p!", ""),
    "upsample_bicubic2d": ("... y! x! -> ... q! p!", ""),
    "upsample_nearest3d": ("... z! y! x! -> ... r! q! p!", ""),
    "upsample_trilinear3d": ("... z! y! x! -> ... r! q! p!", ""),
    "tril": ("... y! x! -> ... y! x!", ""),
    "triu": ("... y! x! -> ... y! x!", ""),
    "view_as_complex": ("... p! -> ...", ""),
    "view_as_real": ("... -> ... p!", ""),
    "all_true": ("... -> ...", ""),
    "expected": ("... -> ...", ""),
    "ctc_losses": ("t! n c!, n s!, n, n -> n", ""),
    "moments": ("n c ... -> t! c", ""),
    "statistics": ("t! c -> c, c", ""),
    "standardize": ("n c ..., t! c, c, c -> n c ...", ""),
    "normalize": ("n c ..., c, c, c, c -> n c ...", ""),
}

# Elementwise with broadcasting, and not linear: their operands cannot be partial sums.
ELEMENTWISE = _names("""
    abs acos asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp
    clamp_max clamp_min copysign cos cosh elu eq erf erfc exp exp2 expm1 floor floor_divide fmod
    ge gelu gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu log
    log10 log1p log2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish
    ne pow reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinh
    softplus sqrt square tan tanh threshold trunc zeros_like ones_like full_like
    _to_copy masked_fill log_sigmoid fill __and__ __or__ __xor__ empty_like lerp addcmul
    addcdiv replaced xlogy erfinv lgamma digamma logaddexp nan_to_num softshrink hardshrink
    """)

# Elementwise and linear in their first operand.
LINEAR = _names("alias clone contiguous neg positive detach")

# Elementwise losses that reduce all dimensions (decomposition has turned means into sums).
LOSSES = _names("""
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits
    """)

# Reductions other than sums over given dimensions, which are not split.
REDUCTIONS = _names("""
    amax amin all any _is_all_true _is_any_true argmax argmin logsumexp mean prod std var
    std_mean var_mean
    """)

# Operators that keep the shape but mix along the dimension in their argument `dim`.
ALONG_DIM = _names(
    "softmax _softmax log_softmax _log_softmax cumsum cumprod flip roll sort argsort"
)

# Operators whose notation depends on their arguments.
BUILDERS: dict[str, Builder] = {
    "view": views.view,
    "_unsafe_view": views.view,
    "reshape": views.view,
    "flatten": views.view,
    "unflatten": views.view,
    "squeeze": views.squeeze,
    "unsqueeze": views.squeeze,
    "permute": views.permute,
    "transpose": views.transpose,
    "t": views.transpose,
    "expand": views.expand,
    "broadcast_tensors": views.broadcast_tensors,
    "full": pointwise.fill_shape,
    "zeros": pointwise.fill_shape,
    "ones": pointwise.fill_shape,
    "empty": pointwise.fill_shape,
    "new_zeros": pointwise.fill_shape,
    "new_empty": pointwise.fill_shape,
    "new_ones": pointwise.fill_shape,
    "new_full": pointwise.fill_shape,
    "scalar_tensor": pointwise.fill_shape,
    "uniform": pointwise.fill_shape,
    "arange": pointwise.arange,
    "linspace": pointwise.arange,
    "eye": pointwise.arange,
    "slice": views.slice_,
    "split": views.split,
    "split_with_sizes": views.split,
    "chunk": views.split,
    "unbind": views.unbind,
    "select": views.select,
    "pad": views.pad,
    "constant_pad_nd": views.pad,
    "cat": views.cat,
    "stack": views.stack,
    "repeat": views.repeat,
    "repeat_interleave": views.repeat_interleave,
    "pixel_shuffle": views.pixel_shuffle,
    "glu": views.glu,
    "prelu": pointwise.prelu,
    "min": reductions.extremum,
    "max": reductions.extremum,
    "sum": reductions.sum_,
    "layer_norm": reductions.layer_norm,
    "rms_norm": reductions.layer_norm,
    "group_norm": reductions.group_norm,
    "local_batch_norm": reductions.local_batch_norm,
    "embedding": contractions.embedding,
    "embedding_bags": contractions.embedding_bags,
    "index": indexing.index,
    "index_put": indexing.index_put,
    "index_select": indexing.index_select,
    "gather": indexing.gather,
    "scatter": indexing.scatter,
    "scatter_add": indexing.scatter,
    "placements": indexing.of_whole_mask,
    "positions": indexing.of_whole_mask,
    "topk": indexing.topk,
    "slice_scatter": indexing.slice_scatter,
    "select_scatter": indexing.select_scatter,
    "histc": indexing.histogram,
    "lstm": contractions.recurrent_layers,
    "gru": contractions.recurrent_layers,
    "rnn_tanh": contractions.recurrent_layers,
    "rnn_relu": contractions.recurrent_layers,
    "conv1d": contractions.convolution,
    "conv2d": contractions.convolution,
    "conv3d": contractions.convolution,
    "conv_transpose1d": contractions.transposed_convolution,
    "conv_transpose2d": contractions.transposed_convolution,
    "conv_transpose3d": contractions.transposed_convolution,
    "bilinear": contractions.bilinear,
    "grouped_mm_fallback": contractions.grouped_mm,
    "experts": contractions.experts,
    "chunked_mlp": contractions.chunked_mlp,
    "_grouped_mm": contractions.aligned_grouped_mm,
    "matmul": contractions.matmul,
    "addmm": contractions.addmm,
    "baddbmm": contractions.baddbmm,
    "scaled_dot_product_attention": contractions.attention,
    "cross_entropy_loss": reductions.cross_entropy,
    "linear_cross_entropy": reductions.linear_cross_entropy,
    "nll_loss_nd": reductions.nll_loss,
    "add": pointwise.add,
    "sub": pointwise.add,
    "mul": pointwise.mul,
    "div": pointwise.div,
    "where": pointwise.where,
    "dropout": pointwise.dropout,
}
