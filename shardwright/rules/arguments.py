"""Replaces global sizes in an operator's arguments by the local sizes of a rank.

For example, `view(x, [4, 32, 768])` becomes `view(x, [2, 32, 384])` on a rank with that tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.ir.graph import Arg, Op, whole_number

Shape = tuple[int, ...]


def localize(
    op: Op,
    results: Sequence[Shape],
    local_operands: Sequence[Shape],
    local_results: Sequence[Shape],
) -> Op:
    """`op` with the arguments that one rank passes.

    `results` are the global shapes of the results; the local shapes are those
    of the rank's tiles, operands in the order of `op.operands`.
    """
    rewrite = _REWRITES.get(op.kind)
    return rewrite(op, results, local_operands, local_results) if rewrite else op


def _at(op: Op, index: int, value: Arg) -> Op:
    return replace(op, args=(*op.args[:index], value, *op.args[index + 1 :]))


def _shape_argument(index: int) -> Callable[..., Op]:
    def rewrite(op: Op, _r: Sequence[Shape], _o: Sequence[Shape], local: Sequence[Shape]) -> Op:
        return _at(op, index, local[0])

    return rewrite


def _as_reshape(op: Op, _r: Sequence[Shape], _o: Sequence[Shape], local: Sequence[Shape]) -> Op:
    """A `reshape`: a tile may have other strides than `view` needs, or a dimension of size one."""
    return replace(op, target="aten.reshape.default", args=(op.args[0], local[0]), kwargs=())


def _slice(
    op: Op, results: Sequence[Shape], operands: Sequence[Shape], local: Sequence[Shape]
) -> Op:
    """The same chunk of the local tile, if a slice is one of equal chunks (`views.slice_`)."""
    rank = len(results[0])
    dim = whole_number(op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)) % rank
    length, local_length = results[0][dim], local[0][dim]
    if length == local_length:
        return op
    start = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("start")
    first = whole_number(start or 0)
    if first < 0:  # counts from the end, clamped to zero
        chunks = operands[0][dim] // local_length
        first = max(0, first + chunks * length)
    offset = first // length * local_length
    return replace(op, args=(op.args[0], dim, offset, offset + local_length), kwargs=())


def _split(op: Op, results: Sequence[Shape], _o: Sequence[Shape], local: Sequence[Shape]) -> Op:
    dim = whole_number(op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 0))
    dim %= len(results[0])
    sizes = tuple(shape[dim] for shape in local)
    return replace(
        op, target="aten.split_with_sizes.default", args=(op.args[0], sizes, dim), kwargs=()
    )


def _convolution(op: Op, _r: Sequence[Shape], operands: Sequence[Shape], _l: Sequence[Shape]) -> Op:
    groups = _channels(operands[0], operands[1]) // operands[1][1]
    return _at(op, 6, groups) if len(op.args) > 6 else op


def _channels(shape: Shape, weight: Shape) -> int:
    """Channels of a convolution's input or result, with or without a batch dimension."""
    return shape[len(shape) - len(weight) + 1]


def _group_norm(
    op: Op, results: Sequence[Shape], operands: Sequence[Shape], _l: Sequence[Shape]
) -> Op:
    """`group_norm` with the number of groups that the tile's channels form."""
    groups = op.args[1]
    assert isinstance(groups, int)
    return _at(op, 1, operands[0][1] * groups // results[0][1])


def _local_batch_norm(
    op: Op, results: Sequence[Shape], _o: Sequence[Shape], local: Sequence[Shape]
) -> Op:
    """The local batch norm with the tile's fraction of the batch as argument."""
    share = op.args[3]
    assert isinstance(share, float)
    return _at(op, 3, share * local[0][0] / results[0][0])


def _transposed_convolution(
    op: Op, _r: Sequence[Shape], operands: Sequence[Shape], local: Sequence[Shape]
) -> Op:
    groups = _channels(local[0], operands[1]) // operands[1][1]
    return _at(op, 6, groups) if len(op.args) > 6 else op


_REWRITES: dict[str, Callable[..., Op]] = {
    "view": _as_reshape,
    "_unsafe_view": _as_reshape,
    "reshape": _as_reshape,
    "expand": _shape_argument(1),
    "new_zeros": _shape_argument(1),
    "new_empty": _shape_argument(1),
    "new_ones": _shape_argument(1),
    "new_full": _shape_argument(1),
    "full": _shape_argument(0),
    "zeros": _shape_argument(0),
    "ones": _shape_argument(0),
    "empty": _shape_argument(0),
    "squeeze": _as_reshape,
    "flatten": _as_reshape,
    "unflatten": _as_reshape,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "conv_transpose1d": _transposed_convolution,
    "conv_transpose2d": _transposed_convolution,
    "conv_transpose3d": _transposed_convolution,
    "group_norm": _group_norm,
    "local_batch_norm": _local_batch_norm,
    "uniform": _shape_argument(0),
}
