"""Replaces experts that all compute every token by one operator that sends tokens to their experts.

Models that are written for few experts, as Llama-4 and older GPT-OSS of transformers, multiply the
rows of all tokens by the weights of all experts. Scores that are exactly zero where a token did not
choose an expert (`scattered_scores.py`) scale the rows, or the results, which are summed over
experts. What is multiplied by zero need not be computed:

* Where results are scaled, those of other experts are not read, whatever is computed between, and
  their gradients are zero.
* Where rows are scaled, those for other experts are zero. So are their results and all gradients
  from them, if there are no biases and the steps between the products map zero to zero.

From the first product on no value may have other readers. Any other form is left as it is
(`rules/mixtures/dense_experts.py` tells of it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardwright.ir.graph import Graph, Op, Tensor, whole_numbers
from shardwright.tracing.own_operators.experts import run_steps
from shardwright.tracing.rewrites.batched_products import (
    PRODUCTS,
    Product,
    Weight,
    contracted,
    notation,
    products,
    weight_of,
)
from shardwright.tracing.rewrites.expert_steps import (
    NotAMixtureError,
    require,
    returned,
    steps_between,
)
from shardwright.tracing.rewrites.moved_axes import (
    MOVES,
    Axes,
    Dim,
    MovedError,
    broadcast,
    flat,
    grouped,
    moved,
    named,
)
from shardwright.tracing.rewrites.scattered_scores import Scores, scattered_scores
from shardwright.tracing.rewrites.sent_rows import SentRows, operators

_MOST = 32  # operators between two products, and behind the second one


def with_dense_mixtures(graph: Graph) -> Graph:
    """`graph` with one mixture for experts that compute every token; others become dead code."""
    if not any(op.kind == "scatter" for op in graph.ops):
        return graph
    made: dict[str, list[tuple[Op, Tensor]]] = {}  # by the operator whose place they take
    for down in graph.ops:
        for pair in _pairs(graph, down):
            try:
                found = _Dense(graph, *pair).found()
                made[found.last.name] = operators(graph, found)
            except (NotAMixtureError, MovedError):
                continue
            break
    ops = [one for op in graph.ops for one in [o for o, _ in made.get(op.name, ())] or [op]]
    values = [tensor for pairs in made.values() for _, tensor in pairs[:-1]]
    return replace(graph, ops=tuple(ops), values=(*graph.values, *values)) if made else graph


def _pairs(graph: Graph, down: Op) -> Iterator[tuple[Product, Product]]:
    """Two products, the first of which gives the rows of the second, `down`, by some steps."""
    if down.kind not in PRODUCTS:
        return
    for second in products(graph, down):
        up = _source(graph, down.operands[second.rows])
        if up is not None:
            yield from ((first, second) for first in products(graph, up) if first.scores is None)


def _source(graph: Graph, name: str) -> Op | None:
    """The product from which a value is computed; None if there are none or several."""
    found: dict[str, Op] = {}
    seen, stack = set[str](), [name]
    while stack and len(seen) <= _MOST:
        op = graph.producer.get(stack.pop())
        if op is None or op.name in seen:
            continue
        seen.add(op.name)
        if op.kind in PRODUCTS:
            found[op.name] = op
        else:
            stack.extend(op.operands)
    return next(iter(found.values())) if len(found) == 1 and not stack else None


class _Bias(NamedTuple):
    """A matrix with a row for each expert, and the operators that move it to be added."""

    name: str
    moves: tuple[Op, ...]


class _Dense:
    """Matches experts that compute every token, starting from their two products.

    Dimensions are named "t" for tokens, "e" for experts, "w" for the width of tokens, "u" and "i"
    for the inner width before and behind the steps, and "o" for the width of results.
    """

    def __init__(self, graph: Graph, up: Product, down: Product) -> None:
        self.graph, self.up, self.down = graph, up, down
        found: list[Scores] = []
        self.before, self.scale = self._before(found)
        if down.scores is not None:
            found += [_scores(graph, down.op.operands[down.scores])]
        self.made, self.up_bias = self._biased(up.op)
        result, self.down_bias = self._biased(down.op)
        kept = [letter for letter in down.words[down.weight] if letter in down.result]
        self.after = [] if len(kept) == 1 else self._after(result, found)
        require(len(found) == 1)
        (self.scores,) = found
        self.tokens, self.experts, _ = self.scores.shape(graph)

    def found(self) -> SentRows:
        """The parts of the mixture that computes all experts.

        Raises `NotAMixtureError` or `MovedError` if any operator is not as expected.
        """
        up = weight_of(self.graph, self.up, self.experts, "w", "u")
        down = weight_of(self.graph, self.down, self.experts, "i", "o")
        x, start = self._tokens_at(up.inside)
        steps = self._followed(x, start, (up, down))
        if scaled := self.scale < len(self.before):
            require(self.up_bias is self.down_bias is None and self._keeps_zero(steps))
        return SentRows(
            x=x,
            scores=self.scores,
            weights=((up.name, up.turned), (down.name, down.turned)),
            biases=(
                self.up_bias.name if self.up_bias else None,
                self.down_bias.name if self.down_bias else None,
            ),
            steps=json.dumps(steps),
            casts=(
                _casts(self.before[start : self.scale]),
                _casts(self.before[self.scale :]),
                _casts(self.after),
            ),
            scales_rows=scaled,
            last=self.after[-1] if self.after else self.down.op,
            source=self.down.op.source,
        )

    def _before(self, found: list[Scores]) -> tuple[list[Op], int]:
        """The operators that make the rows of the first product, and the place of the scaling one.

        That is behind all of them if none scales; its scores are added to those `found`.
        """
        path: list[Op] = []
        scale = -1  # from the end
        name = self.up.op.operands[self.up.rows]
        while (op := self.graph.producer.get(name)) is not None:
            if op.kind in MOVES:
                name = op.operands[0]
            elif not found and (scores := self._scores_in(op)):
                found += [scores[0]]
                scale = len(path)
                name = op.operands[1 - scores[1]]
            else:
                break
            path.append(op)
        place = len(path) - 1 - scale if found else len(path)
        return path[::-1], place

    def _scores_in(self, op: Op) -> tuple[Scores, int] | None:
        """The scores by which an operator multiplies, and their place among both operands."""
        if op.kind not in ("mul", "einsum") or len(op.operands) != 2:
            return None
        given = [scattered_scores(self.graph, name) for name in op.operands]
        pairs = [(one, place) for place, one in enumerate(given) if one is not None]
        return pairs[0] if len(pairs) == 1 else None

    def _after(self, name: str, found: list[Scores]) -> list[Op]:
        """The operators from the results of the second product to the sum over experts."""
        path: list[Op] = []
        while len(path) < _MOST:
            op = self._only_reader(name)
            path.append(op)
            if op.kind == "sum":
                return path
            if op.kind not in MOVES:
                scores = self._scores_in(op)
                if scores is None:
                    break
                found += [scores[0]]
                words, result = notation(op)
                if len(result) < len(words[1 - scores[1]] if words else ""):
                    return path
            (name,) = op.outputs
        raise NotAMixtureError

    def _only_reader(self, name: str) -> Op:
        readers = self.graph.consumers[name]
        require(len(readers) == 1 and name not in returned(self.graph))
        require(readers[0].operands.count(name) == 1)
        return readers[0]

    def _biased(self, product: Op) -> tuple[str, _Bias | None]:
        """The result of a product with a bias of each expert, and that bias."""
        (name,) = product.outputs
        readers = self.graph.consumers[name]
        if len(readers) != 1 or readers[0].kind != "add" or len(readers[0].operands) != 2:
            return name, None
        added = self._only_reader(name)
        require(len(added.args) == 2 and not added.kwargs)
        bias = next(one for one in added.operands if one != name)
        moves: list[Op] = []
        while len(self.graph.tensor[bias].shape) != 2:
            op = self.graph.producer.get(bias)
            require(op is not None and op.kind in MOVES and op.kind != "_to_copy")
            assert op is not None
            moves.insert(0, op)
            bias = op.operands[0]
        return added.outputs[0], _Bias(bias, tuple(moves))

    def _tokens_at(self, width: int) -> tuple[str, int]:
        """The value (tokens, width) of which rows are made, and where its operators begin.

        It is the last one of that shape before rows are scaled, or else the first of all.
        """
        names = [op.operands[0] for op in self.before[: self.scale]]
        if self.scale < len(self.before):
            scaled = self.before[self.scale]
            scores = self._scores_in(scaled)
            assert scores is not None
            names += [scaled.operands[1 - scores[1]]]
        else:
            names += [self.up.op.operands[self.up.rows]]
        for at in range(len(names) - 1, -1, -1):
            if self.graph.tensor[names[at]].shape == (self.tokens, width):
                return names[at], at
        require(self.graph.tensor[names[0]].num_elements == self.tokens * width)
        return names[0], 0

    def _followed(self, x: str, start: int, weights: tuple[Weight, Weight]) -> list[Any]:
        """The steps between the products, where all dimensions are what they must be."""
        up, down = weights
        rows = (*named("t", self.tokens), *named("w", up.inside))
        axes = grouped(rows, self.graph.tensor[x].shape)
        axes = self._through(self.before[start:], axes, ([],))
        axes = self._added(self._multiplied(self.up, up, axes), self.up_bias, "u", up.outside)
        require(axes[-1] == named("u", up.outside))
        place = self.down.op.operands[self.down.rows]
        steps = steps_between(self.graph, self.made, self.down.op, place)
        axes = self._multiplied(self.down, down, (*axes[:-1], named("i", down.inside)))
        axes = self._added(axes, self.down_bias, "o", down.outside)
        axes = self._through(self.after, axes, ([], [named("e", self.experts)]))
        require(flat(axes) == (*named("t", self.tokens), *named("o", down.outside)))
        return steps

    def _multiplied(self, product: Product, weight: Weight, rows: Axes) -> Axes:
        """The axes of the result of a product; the second one may sum over experts."""
        given = {product.rows: rows, product.weight: weight.axes}
        if product.scores is not None:
            given[product.scores] = self.scores.axes(self.graph)
        operands = [given[place] for place in range(len(given))]
        axes, summed = contracted(product.words, product.result, operands)
        expected = [weight.summed]
        if product is self.down and not self.after:
            expected.append(named("e", self.experts))
        require(sorted(summed) == sorted(expected))
        return axes

    def _added(self, axes: Axes, bias: _Bias | None, label: str, width: int) -> Axes:
        """The axes of a result with its bias, which has a row for each expert."""
        if bias is None:
            return axes
        rows = (named("e", self.experts), named(label, width))
        require(self.graph.tensor[bias.name].shape == (self.experts, width))
        require(broadcast(axes, self._through(bias.moves, rows, ())) == axes)
        return axes

    def _through(self, path: Sequence[Op], axes: Axes, sums: Sequence[list[Dim]]) -> Axes:
        """The axes behind operators that move, scale, and sum what is one of `sums`."""
        for op in path:
            if op.kind in MOVES:
                axes = moved(op, axes, self.graph.tensor[op.outputs[0]].shape)
            elif op.kind == "mul":
                axes = broadcast(axes, self.scores.axes(self.graph))
            else:
                axes, summed = self._summed(op, axes)
                require(summed in sums)
        return axes

    def _summed(self, op: Op, axes: Axes) -> tuple[Axes, list[Dim]]:
        """The axes of a sum, or of an einsum with scores, and the dimensions that it sums."""
        if op.kind == "einsum":
            words, result = notation(op)
            scores = self._scores_in(op)
            assert scores is not None
            operands = [axes, axes]
            operands[scores[1]] = self.scores.axes(self.graph)
            return contracted(words, result, operands)
        require(op.target == "aten.sum.dim_IntList" and len(op.args) == 2 and not op.kwargs)
        dims = {dim % len(axes) for dim in whole_numbers(op.args[1])}
        kept = tuple(dim for i, dim in enumerate(axes) if i not in dims)
        return kept, [dim for i, dim in enumerate(axes) if i in dims]

    def _keeps_zero(self, steps: list[Any]) -> bool:
        """Whether the steps between the products make zeros of zeros."""
        made = self.graph.tensor[self.made]
        zeros = torch.zeros(1, made.shape[-1], dtype=getattr(torch, made.dtype), device="cpu")
        return not bool(run_steps(steps, zeros).ne(0).any())


def _scores(graph: Graph, name: str) -> Scores:
    found = scattered_scores(graph, name)
    if found is None:
        raise NotAMixtureError
    return found


def _casts(path: Sequence[Op]) -> tuple[Op, ...]:
    """The operators of a path that change the dtype."""
    return tuple(op for op in path if op.kind == "_to_copy")
