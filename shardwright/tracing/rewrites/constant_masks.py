"""Recognises attention masks that are causal, or that allow everything, by computing them.

While a model is traced, Hugging Face builds the causal mask as a tensor instead of passing
`is_causal`, and for encoders one that is true everywhere; without a cache it also compares the
documents of packed positions, for every sequence of the batch. A mask takes memory, excludes the
fastest kernels and doubles the work. A mask that depends on no leaf of the graph is a constant: it
is computed here, replaced by the flag if it is the lower triangle, and left out if all is allowed.

The mask of a long sequence is too large to compute. If elementwise operators make it from
positions, blocks of it can be computed separately: evenly spaced rows, evenly spaced columns, and a
band along the diagonal. Sliding windows differ from a causal mask in rows longer than the window,
packed documents next to the diagonal. Differences in other elements are not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch

from shardwright.ir.graph import Graph, Op, argument
from shardwright.tracing.export.operators import call_op, operator_of

_GIVEN = ("attn_mask", "dropout_p", "is_causal")  # arguments that the rewrite passes by position
_LARGEST_MASK = 2**27  # elements; larger masks are computed in blocks
_SAME_PLACES = ("expand", "clone", "contiguous")
_SAME_MATRIX = (*_SAME_PLACES, "unsqueeze", "view")
_LOGICAL = ("__and__", "__or__", "__xor__")  # elementwise, without torch's tag `pointwise`
_LARGEST_PART = 2**26  # elements of a block of a larger mask
_PATTERNS = {
    "whole": lambda row, column: (row >= 0) & (column >= 0),
    "causal": lambda row, column: column <= row,
}


def without_constant_masks(graph: Graph) -> Graph:
    """`graph` with `is_causal` instead of causal masks, and without masks that allow everything.

    Masks of up to 2**27 elements are compared as a whole, larger ones in blocks.
    """
    found: dict[str, str | None] = {}

    def rewrite(op: Op) -> Op:
        if op.kind != "scaled_dot_product_attention" or len(op.operands) != 4:
            return op
        mask = op.operands[3]
        if mask not in found:
            found[mask] = _pattern(graph, mask)
        if found[mask] is None:
            return op
        causal = found[mask] == "causal"
        query, key = (graph.tensor[name].shape[-2] for name in op.operands[:2])
        if causal and graph.tensor[mask].shape[-2:] != (query, key):
            return op
        kwargs = tuple(pair for pair in op.kwargs if pair[0] not in _GIVEN)
        saves = tuple(name for name in op.saves if name != mask)
        dropped = argument(op, 4, "dropout_p", 0.0)
        return replace(op, args=(*op.args[:3], None, dropped, causal), kwargs=kwargs, saves=saves)

    return replace(graph, ops=tuple(rewrite(op) for op in graph.ops))


def _pattern(graph: Graph, mask: str) -> str | None:
    """The key of `_PATTERNS` that `mask` is, a constant; None if it is no constant or another.

    A mask of floating numbers, which is added to the scores, is known if all of it is zero.
    """
    described = graph.tensor[mask]
    if len(described.shape) < 2 or not ("float" in described.dtype or described.dtype == "bool"):
        return None
    rows, columns = described.shape[-2:]
    needed = _ancestors(graph, mask)
    if needed is None:
        return None
    made = (graph.tensor[op.outputs[0]] for op in needed)
    if rows * columns > _LARGEST_MASK or any(
        one.num_elements > _LARGEST_MASK and not one.alias_of for one in made
    ):
        return _pattern_by_samples(graph, mask, needed)
    values: dict[str, torch.Tensor] = {}
    for op in needed:
        results = call_op(op, values, torch.device("cpu"))
        values.update(zip(op.outputs, results, strict=True))
    every = torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu")
    return next((name for name in _PATTERNS if _is(name, values[mask], *every)), None)


def _is(name: str, mask: torch.Tensor, down: torch.Tensor, across: torch.Tensor) -> bool:
    """Whether the block of a mask at these rows and columns is that of the pattern."""
    if mask.is_floating_point():
        return name == "whole" and not any(part.any() for part in _matrices(mask))
    expected = _PATTERNS[name](down.unsqueeze(-1), across)
    return all(torch.equal(part.expand_as(expected), expected) for part in _matrices(mask))


def _matrices(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrices in the last two dimensions; of an expanded dimension only the first."""
    if x.dim() == 2:
        yield x
        return
    for part in x[:1] if x.stride(0) == 0 else x:
        yield from _matrices(part)


def _pattern_by_samples(graph: Graph, mask: str, needed: list[Op]) -> str | None:
    """The pattern that blocks of a mask have that is too large to compute.

    `needed` are the operators that compute the mask. None if a large one is not elementwise.
    """
    *leading, rows, columns = graph.tensor[mask].shape
    small: dict[str, torch.Tensor] = {}
    large: list[Op] = []
    for op in needed:
        if graph.tensor[op.outputs[0]].num_elements <= _LARGEST_PART:
            if any(name not in small for name in op.operands):
                return None
            results = call_op(op, small, torch.device("cpu"))
            small.update(zip(op.outputs, results, strict=True))
        elif not _is_elementwise(graph, op, rows, columns):
            return None
        else:
            large.append(op)
    small = {name: _one_of_equal(value) for name, value in small.items()}
    possible = list(_PATTERNS)
    for down, across in _sampled_blocks(rows, columns, _LARGEST_PART // prod(leading)):
        values = dict(small)
        for op in large:
            _compute_block(op, values, small, (rows, columns), (down, across))
        possible = [name for name in possible if _is(name, values[mask], down, across)]
        if not possible:
            return None
    return possible[0]


def _one_of_equal(x: torch.Tensor) -> torch.Tensor:
    """The first matrix of `x`, in its leading dimensions, if all are equal; else `x`."""
    if x.dim() < 3:
        return x
    first = x[(slice(0, 1),) * (x.dim() - 2)]
    return first if torch.equal(first.expand_as(x), x) else x


def _is_elementwise(graph: Graph, op: Op, rows: int, columns: int) -> bool:
    """Whether an element of the result depends only on elements at its row and its column."""
    shape = graph.tensor[op.outputs[0]].shape
    if shape[-2:] != (rows, columns) or len(op.outputs) > 1:
        return False
    if op.kind in _SAME_MATRIX:
        source = graph.tensor[op.operands[0]].shape
        # A block keeps the leading dimensions of `source`, which would broadcast differently.
        placed = op.kind in _SAME_PLACES or prod(source[:-2]) == 1
        sizes = zip(source[-2:], shape[-2:], strict=len(source) > 1)
        return placed and all(a == b or (a == 1 and op.kind == "expand") for a, b in sizes)
    tags = getattr(operator_of(op.target), "tags", ())
    return torch.Tag.pointwise in tags or op.kind in _LOGICAL


def _sampled_blocks(
    rows: int, columns: int, most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Indices of the rows and of the columns of each block to check.

    First some rows with all columns, then all rows with some columns, each of about `most`
    elements, and then smaller blocks along the diagonal.
    """
    every = torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu")
    count = max(16, most // max(rows, columns))
    some = [torch.linspace(0, n - 1, min(count, n), device="cpu").long() for n in (rows, columns)]
    yield some[0], every[1]
    yield every[0], some[1]
    band = min(1024, count)
    for start in range(0, min(rows, columns), band):
        around = slice(max(0, start - 1), start + band + 1)
        yield every[0][start : start + band], every[1][around]


def _compute_block(
    op: Op,
    values: dict[str, torch.Tensor],
    small: dict[str, torch.Tensor],
    whole: tuple[int, int],
    part: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Compute the block `part` of the result of `op`, and add it to `values`.

    `values` has the small operands and blocks of the large ones, `small` has the small ones;
    `whole` is the size of the matrix, `part` has the indices of the block's rows and columns.
    """

    def cut(x: torch.Tensor) -> torch.Tensor:
        for dim, size, positions in zip((-2, -1), whole, part, strict=True):
            if x.dim() >= -dim and x.shape[dim] == size > 1:
                x = x.index_select(dim, positions)
        return x

    given = {name: cut(values[name]) if name in small else values[name] for name in op.operands}
    if op.kind in _SAME_MATRIX:
        values[op.outputs[0]] = given[op.operands[0]]
        return
    (values[op.outputs[0]],) = call_op(op, given, torch.device("cpu"))


def _ancestors(graph: Graph, value: str) -> list[Op] | None:
    """The operators that compute `value`, in order; None if it depends on a leaf of the graph."""
    found: dict[str, Op] = {}
    stack = [value]
    while stack:
        name = stack.pop()
        if name not in graph.producer:
            return None
        op = graph.producer[name]
        if op.name not in found:
            found[op.name] = op
            stack.extend(op.operands)
    order = {op.name: i for i, op in enumerate(graph.ops)}
    return sorted(found.values(), key=lambda op: order[op.name])
