"""Products of rows with a matrix for each expert, as bmm, matmul or einsum: which axes go where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from shardwright.ir.graph import Graph, Op
from shardwright.tracing.rewrites.moved_axes import (
    TURNS,
    Axes,
    Dim,
    MovedError,
    moved,
    named,
    unified,
)

PRODUCTS = ("bmm", "matmul", "einsum")


class Product(NamedTuple):
    """A product in Einstein's notation, and which operand is which.

    Attributes:
        op: the operator.
        words: the letters of the dimensions of each operand.
        result: those of the result.
        rows: the position of the rows.
        weight: the position of the matrices of experts.
        scores: the position of scores, if they are a factor, too.
    """

    op: Op
    words: tuple[str, ...]
    result: str
    rows: int
    weight: int
    scores: int | None = None


class Weight(NamedTuple):
    """Matrices of experts in a product, as `experts.experts` takes them.

    Attributes:
        name: the value (experts, features, features).
        turned: whether the last dimension is the one that the product sums.
        summed: that dimension.
        inside: its size.
        outside: the size of the other one.
        axes: the axes of the product's operand.
    """

    name: str
    turned: bool
    summed: Dim
    inside: int
    outside: int
    axes: Axes


def products(graph: Graph, op: Op) -> Iterator[Product]:
    """`op` as a product of rows and matrices, in every order that its operands may have."""
    ranks = [len(graph.tensor[name].shape) for name in op.operands]
    if op.kind in ("bmm", "matmul"):
        if len(ranks) == 2 and ranks[0] in (2, 3) and ranks[1] == 3:
            yield Product(op, ("bc" if ranks[0] == 2 else "abc", "acd"), "abd", 0, 1)
        return
    words, result = notation(op)
    if len(words) not in (2, 3) or [len(word) for word in words] != ranks:
        return
    for places in permutations(range(len(words))):
        if ranks[places[1]] == 3:
            yield Product(op, words, result, *places)


def contracted(
    words: Sequence[str], result: str, operands: Sequence[Axes]
) -> tuple[Axes, list[Dim]]:
    """The axes of a product, and the dimensions that it sums, from those of its operands.

    Raises `MovedError` if operands differ along a dimension.
    """
    found: dict[str, Dim] = {}
    for word, axes in zip(words, operands, strict=True):
        for letter, dim in zip(word, axes, strict=True):
            found[letter] = unified(found.get(letter, ()), dim)
    summed = [dim for letter, dim in found.items() if letter not in result]
    return tuple(found[letter] for letter in result), summed


def weight_of(graph: Graph, product: Product, experts: int, inside: str, outside: str) -> Weight:
    """The matrices of a product that sums their features `inside`, and gives those `outside`.

    Raises `MovedError` if there is no matrix for each expert.
    """
    name, path = product.op.operands[product.weight], list[Op]()
    while (op := graph.producer.get(name)) is not None and op.kind in TURNS:
        path.insert(0, op)
        name = op.operands[0]
    shape = graph.tensor[name].shape
    if len(shape) != 3 or shape[0] != experts or min(shape) < 2:
        raise MovedError(f"{shape} has no matrix for each of {experts} experts")
    for turned in (False, True):
        labels = (outside, inside) if turned else (inside, outside)
        axes: Axes = tuple(named(*one) for one in zip(("e", *labels), shape, strict=True))
        for op in path:
            axes = moved(op, axes, graph.tensor[op.outputs[0]].shape)
        word, at = product.words[product.weight], 2 if turned else 1
        kept = [dim for x, dim in zip(word, axes, strict=True) if x in product.result]
        summed = named(inside, shape[at])
        if summed not in kept and named(outside, shape[3 - at]) in kept:
            return Weight(name, turned, summed, shape[at], shape[3 - at], axes)
    raise MovedError(f"{product.op} sums no features, or all")


def notation(op: Op) -> tuple[tuple[str, ...], str]:
    """The words of an einsum's operands and of its result; empty if it has an ellipsis."""
    equation = str(op.args[0]).replace(" ", "") if op.kind == "einsum" else ""
    given, arrow, result = equation.partition("->")
    words = tuple(given.split(","))
    repeats = any(len({*word}) < len(word) for word in words)
    return (words, result) if arrow and "." not in given and not repeats else ((), "")
