"""Writes the operators that send rows to chosen experts in place of computing all of them.

Scores behind the second product are those of the operator. Scores before the first one scale the
rows, one for each choice of a token; the operator takes these as tokens that chose one expert each,
with a score of one, and the results of a token are summed behind it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from shardwright.ir.graph import Arg, Graph, Op, Ref, Source, Symbol, Tensor
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.gradients.autograd import observe
from shardwright.tracing.own_operators.experts import EXPERTS, GROUPED_KERNEL
from shardwright.tracing.own_operators.registered import registered
from shardwright.tracing.rewrites.expert_steps import NotAMixtureError, require, with_facts
from shardwright.tracing.rewrites.scattered_scores import Scores

_ROW = 16  # bytes at whose multiples rows of torch's grouped products begin
_LOOP = "transformers.grouped_mm_fallback.default"


class SentRows(NamedTuple):
    """A mixture that computes all experts for every token, as its parts.

    Attributes:
        x: the tokens, (tokens, width) or a view of it.
        scores: the scores of all experts.
        weights: both matrices of experts, and whether they are turned (`experts.experts`).
        biases: those of both products, where they have any.
        steps: the steps between the products, as JSON.
        casts: those of tokens, of scaled rows, and of results, each in order.
        scales_rows: whether scores scale rows before the first product.
        last: the operator that gives the sums over experts.
        source: where the products are in the user's code.
    """

    x: str
    scores: Scores
    weights: tuple[tuple[str, bool], tuple[str, bool]]
    biases: tuple[str | None, str | None]
    steps: str
    casts: tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]
    scales_rows: bool
    last: Op
    source: Source


def operators(graph: Graph, found: SentRows) -> list[tuple[Op, Tensor]]:
    """The operators that take the place of `found.last`, in order, each with its result.

    Raises `NotAMixtureError` if the result would have another dtype, or nothing computes it.
    """
    writer = _Writer(graph, found)
    tokens, _, k = found.scores.shape(graph)
    last = len(graph.tensor[found.scores.every].shape) - 1
    every, chosen = Ref(found.scores.every), Ref(found.scores.chosen)
    scores = writer.view(writer.add("aten.gather.default", every, last, chosen), (tokens, k))
    scores = writer.cast([op for op in found.scores.moves if op.kind == "_to_copy"], scores)
    width = graph.tensor[found.x].num_elements // tokens
    x = writer.cast(found.casts[0], writer.view(found.x, (tokens, width)))
    result = graph.tensor[found.last.outputs[0]]
    if found.scales_rows:
        made = writer.of_scaled_rows(x, scores, (tokens, k))
    else:
        if (dtype := writer.tensors[scores].dtype) != result.dtype:
            wide = torch.promote_types(getattr(torch, dtype), getattr(torch, result.dtype))
            require(wide == getattr(torch, result.dtype))
            scores = writer.add(
                "aten._to_copy.default", Ref(scores), dtype=Symbol("dtype", result.dtype)
            )
        made = writer.experts(x, writer.view(found.scores.chosen, (tokens, k)), scores)
    made = writer.view(made, result.shape)
    require(writer.tensors[made].dtype == result.dtype)
    return writer.named_as(result)


class _Writer:
    """The operators written so far."""

    def __init__(self, graph: Graph, found: SentRows) -> None:
        self.found = found
        self.written: list[tuple[Op, Tensor]] = []
        self.tensors: ChainMap[str, Tensor] = ChainMap({}, graph.tensor)

    def of_scaled_rows(self, x: str, scores: str, sizes: tuple[int, int]) -> str:
        """Sums of a token's results, of rows that are scaled before the first product."""
        (tokens, k), chosen = sizes, self.found.scores.chosen
        if k > 1:
            x = self.add("aten.unsqueeze.default", Ref(x), 1)
            scores = self.add("aten.unsqueeze.default", Ref(scores), 2)
        rows = self.cast(self.found.casts[1], self.add("aten.mul.Tensor", Ref(x), Ref(scores)))
        rows = self.view(rows, (tokens * k, self.tensors[rows].shape[-1]))
        chosen = self.view(chosen, (tokens * k, 1))
        dtype = Symbol("dtype", self.tensors[rows].dtype)
        ones = self.add("aten.ones_like.default", Ref(chosen), dtype=dtype)
        made = self.cast(self.found.casts[2], self.experts(rows, chosen, ones))
        if k > 1:
            made = self.view(made, (tokens, k, self.tensors[made].shape[-1]))
            made = self.add("aten.sum.dim_IntList", Ref(made), (1,))
        return made

    def experts(self, rows: str, chosen: str, scores: str) -> str:
        """The mixture of rows, chosen experts and their scores."""
        biases = tuple(Ref(name) if name else None for name in self.found.biases)
        weights = [name for name, _ in self.found.weights]
        args = (
            *(Ref(name) for name in (rows, chosen, scores, *weights)),
            tuple(turned for _, turned in self.found.weights),
            self._product(rows, weights),
            self.found.steps,
            *(biases if any(biases) else ()),
        )
        return self.add(EXPERTS, *args)

    def cast(self, casts: Sequence[Op], name: str) -> str:
        """A value after the casts of other values, in order."""
        for op in casts:
            name = self.add(op.target, Ref(name), *op.args[1:], **dict(op.kwargs))
        return name

    def view(self, name: str, shape: tuple[int, ...]) -> str:
        """A value in another shape, which is itself if it has that shape."""
        if self.tensors[name].shape == shape:
            return name
        return self.add("aten.view.default", Ref(name), shape)

    def add(self, target: str, *args: Arg, **kwargs: Arg) -> str:
        """Write an operator with one result, and return its name."""
        name = f"{self.found.last.name}.sent.{len(self.written)}"
        op = Op(name, target, args, tuple(kwargs.items()), (name,), self.found.source)
        operands = list(dict.fromkeys(op.operands))
        leaves = [
            torch.empty(
                self.tensors[one].shape,
                dtype=getattr(torch, self.tensors[one].dtype),
                device="meta",
            ).requires_grad_(self.tensors[one].requires_grad)
            for one in operands
        ]
        results: list[torch.Tensor] = []

        def call(given: list[torch.Tensor]) -> list[torch.Tensor]:
            results[:] = call_op(op, dict(zip(operands, given, strict=True)), torch.device("meta"))
            return results

        facts = observe(call, leaves)
        saves = [operands[i] for i in facts.saved_operands] + [name] * len(facts.saved_results)
        op = replace(op, saves=tuple(saves), extra_saved=facts.extra_saved)
        (alias,) = facts.alias_of
        made = Tensor(
            name,
            tuple(results[0].shape),
            str(results[0].dtype).removeprefix("torch."),
            facts.requires_grad[0],
            operands[alias] if alias >= 0 else "",
        )
        self.written.append((with_facts(op, self.tensors) if target == EXPERTS else op, made))
        self.tensors[name] = made
        return name

    def named_as(self, result: Tensor) -> list[tuple[Op, Tensor]]:
        """All that was written, the last of which gives `result`."""
        op, made = self.written[-1]
        saves = tuple(result.name if name == made.name else name for name in op.saves)
        last = replace(op, name=self.found.last.name, outputs=(result.name,), saves=saves)
        return [*self.written[:-1], (last, replace(made, name=result.name))]

    def _product(self, rows: str, weights: list[str]) -> str:
        """The grouped product: torch's kernel where it takes these, else one that loops."""
        used = [self.tensors[name] for name in (rows, *weights)]
        require(len({tensor.dtype for tensor in used}) == 1)
        aligned = all(2 * n % _ROW == 0 for tensor in used for n in tensor.shape[1:])
        if used[0].dtype == "bfloat16" and aligned:
            return GROUPED_KERNEL
        try:
            registered(_LOOP)
        except (ImportError, AttributeError):  # there is no transformers, or one without it
            raise NotAMixtureError from None
        return _LOOP
