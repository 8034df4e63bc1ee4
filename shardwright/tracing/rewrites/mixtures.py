"""Finds mixtures of experts in a graph and replaces each by one operator.

The form is that of Hugging Face: tokens are copied for each chosen expert, sorted by expert,
multiplied by two grouped matrix products with elementwise operators between, and biases of each
expert if it has any, scaled by their scores and summed by token. Every operator is checked, and
from the first product on no value may have other readers. Any other form is left unchanged: it is
correct, but its tokens and experts are not split.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from shardwright.ir.graph import Arg, Graph, Op, Ref, json_argument, whole_numbers
from shardwright.rules.operators.steps import EVERY, EXPERTS_BIASES, PART
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.gradients.autograd import AutogradFacts, observe
from shardwright.tracing.own_operators.experts import EXPERTS

_PRODUCTS = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
_LOGICAL = ("_to_copy", "clone", "alias", "contiguous")
_GATHERING = "index"


class _NotAMixtureError(Exception):
    """Raised for a candidate that is not a mixture of experts of the known form."""


def with_mixtures(graph: Graph) -> Graph:
    """`graph` with one operator, `experts.EXPERTS`, for each mixture of experts.

    It takes the place of the mixture's last operator; the other operators stay in the graph.
    """
    products: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.target in _PRODUCTS and len(op.operands) == 3:
            products.setdefault(op.operands[2], []).append(op)
    made: dict[str, Op] = {}  # by the operator that it replaces
    for pair in products.values():
        if len(pair) != 2:
            continue
        try:
            last, op = _Mixture(graph, *pair).found()
        except _NotAMixtureError:
            continue
        made[last.name] = op
    return replace(graph, ops=tuple(made.get(op.name, op) for op in graph.ops))


class _Mixture:
    """Matches one mixture of experts, starting from its two grouped products `up` and `down`."""

    def __init__(self, graph: Graph, up: Op, down: Op) -> None:
        self.graph, self.up, self.down = graph, up, down
        # The results of the products, with their biases.
        self.made, self.returned = up.outputs[0], down.outputs[0]

    def found(self) -> tuple[Op, Op]:
        """The last operator of the mixture, and the operator that replaces all of it.

        Raises `_NotAMixtureError` if any operator is not as expected.
        """
        graph = self.graph
        sort = self._sort()
        order = sort.outputs[1]
        flat = sort.operands[0]
        chosen = self._made(flat, "view").operands[0]
        count, each = _matrix(graph, chosen)
        gather = self._made(self.up.operands[0], _GATHERING)
        x, token = gather.operands
        halved = self._made(token, "floor_divide")
        _require(halved.operands == (order,) and halved.args[1] == each)
        _require(_matrix(graph, x)[0] == count and self._indexed(gather) == (0,))
        self.made, up_bias = self._biased(self.up, sort.outputs[0])
        self.returned, down_bias = self._biased(self.down, sort.outputs[0])
        steps = self._between()
        weights = [self._weight(product) for product in (self.up, self.down)]
        biases = () if up_bias is down_bias is None else (up_bias, down_bias)
        scores, last = self._scored(order, (count, each))
        op = Op(
            last.name,
            EXPERTS,
            (
                Ref(x),
                Ref(chosen),
                Ref(scores),
                *(Ref(name) for name, _ in weights),
                tuple(turned for _, turned in weights),
                self.up.target,
                json.dumps(steps),
                *biases,
            ),
            (),
            last.outputs,
            last.source,
        )
        _require(self.up.target == self.down.target)
        return last, self._with_facts(op)

    def _sort(self) -> Op:
        """The sort by expert, found from the products' offsets: cumulative counts of its result."""
        name = self.up.operands[2]
        for _ in range(6):
            op = self._producer(name)
            if op.kind == "sort":
                _require(name == op.outputs[0] and len(self.graph.tensor[name].shape) == 1)
                return op
            _require(op.kind in ("cumsum", "histc", "_to_copy", "bincount"))
            name = op.operands[0]
        raise _NotAMixtureError

    def _biased(self, product: Op, experts: str) -> tuple[str, Ref | None]:
        """The result of a product with its bias, and that bias, a row for each expert.

        `experts` are the experts of the rows.
        """
        (name,) = product.outputs
        readers = self.graph.consumers[name]
        if len(readers) != 1 or readers[0].kind != "add" or name in self.graph.outputs:
            return name, None
        added = readers[0]
        (other,) = (one for one in added.operands if one != name)
        look_up = self.graph.producer.get(other)
        if look_up is None or look_up.kind != _GATHERING:
            return name, None
        bias, *index = look_up.operands
        of_rows = index == [experts] and self._indexed(look_up) == (0,)
        _require(of_rows and len(added.args) == 2 and not added.kwargs)
        shape = self.graph.tensor[product.operands[1]].shape[0], self.graph.tensor[name].shape[-1]
        _require(_matrix(self.graph, bias) == shape)
        return added.outputs[0], Ref(bias)

    def _between(self) -> list[Any]:
        """The steps from the first product to the second, as JSON values for `experts.experts`.

        A step is [operator, args, kwargs]. {"value": i} refers to the product (0) or to step i.
        """
        number = {self.made: 0}
        steps: list[Any] = []
        goal = self.down.operands[0]
        inside = self._descendants(self.made, goal)
        for op in inside:
            _require(all(name in number for name in op.operands))
            if op.kind == "slice":
                number[op.outputs[0]] = len(steps) + 1
                steps.append([EVERY, [{"value": number[op.operands[0]]}, *self._every(op)], {}])
                continue
            if op.kind in ("split", "split_with_sizes", "chunk"):
                self._require_last(
                    op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 0)
                )
                sizes = {self.graph.tensor[name].shape[-1] for name in op.outputs}
                _require(len(sizes) == 1)
                for i, name in enumerate(op.outputs):
                    number[name] = len(steps) + 1
                    given = {"value": number[op.operands[0]]}
                    steps.append([PART, [given, i, len(op.outputs)], {}])
                continue
            target = getattr(torch.ops.aten, op.kind, None)
            tags = getattr(getattr(target, op.target.split(".")[2], None), "tags", ())
            _require(torch.Tag.pointwise in tags or op.kind in _LOGICAL)
            try:
                args = [json_argument(a, number) for a in op.args]
                kwargs = {key: json_argument(a, number) for key, a in op.kwargs}
            except ValueError:
                raise _NotAMixtureError from None
            number[op.outputs[0]] = len(steps) + 1
            steps.append([op.target, args, kwargs])
        _require(bool(steps) and number.get(goal) == len(steps))
        _require(not {PART, EVERY} <= {step[0] for step in steps})
        for name in number:
            readers = {op.name for op in self.graph.consumers[name]}
            _require(readers <= {self.down.name, *(op.name for op in inside)})
        return steps

    def _every(self, op: Op) -> tuple[int, int]:
        """The number of a part and the number of parts, where `op` takes every n-th feature."""
        _, *given = op.args
        _require(len(given) == 4 and all(isinstance(one, int) for one in given))
        dim, start, end, step = whole_numbers(tuple(given))
        self._require_last(dim)
        size = self.graph.tensor[op.operands[0]].shape[-1]
        _require(0 <= start < step and end >= size and size % step == 0)
        return start, step

    def _descendants(self, start: str, goal: str) -> list[Op]:
        """The operators that compute `goal` from `start`, in the order of the graph."""
        wanted: dict[str, Op] = {}
        stack = [goal]
        while stack:
            name = stack.pop()
            if name == start:
                continue
            op = self._producer(name)
            if op.name not in wanted:
                wanted[op.name] = op
                stack.extend(op.operands)
            _require(len(wanted) < 32)
        return [op for op in self.graph.ops if op.name in wanted]

    def _weight(self, product: Op) -> tuple[str, bool]:
        """The name of the experts' weights, and whether the product reads them transposed."""
        name = product.operands[1]
        op = self.graph.producer.get(name)
        if op is None or op.kind != "transpose":
            return name, False
        _require({d % 3 for d in whole_numbers(op.args[1:3])} == {1, 2})
        return op.operands[0], True

    def _scored(self, order: str, shape: tuple[int, int]) -> tuple[str, Op]:
        """The name of the scores, and the operator that sums the scaled rows of each token."""
        scaled = self._only_reader(self.returned, "mul")
        column = next(name for name in scaled.operands if name != self.returned)
        sorted_scores = self._made(self._made(column, "unsqueeze").operands[0], _GATHERING)
        _require(sorted_scores.operands[1] == order)
        scores = self._made(sorted_scores.operands[0], "view").operands[0]
        _require(_matrix(self.graph, scores) == shape)
        back = self._only_reader(scaled.outputs[0], _GATHERING)
        _require(back.operands[0] == scaled.outputs[0] and self._indexed(back) == (0,))
        inverse = self._made(back.operands[1], "index_put")
        _require(inverse.operands[1] == order)
        _require(self._producer(inverse.operands[2]).kind == "arange")
        per_token = self._only_reader(back.outputs[0], "view")
        _require(self.graph.tensor[per_token.outputs[0]].shape[:2] == shape)
        total = self._only_reader(per_token.outputs[0], "sum")
        _require(total.args[1:] == ((1,),) and not total.kwargs)
        return scores, total

    def _with_facts(self, op: Op) -> Op:
        """`op` with the facts of what autograd saves.

        Observations at twice the inner width separate the bytes that scale with it, at a width of
        tokens at which the same tensors are kept (`experts.scales_inside`).
        """
        whole = self._observed(op)
        saves = tuple(dict.fromkeys(op.operands))
        saves = tuple(saves[i] for i in whole.saved_operands)
        wider = 2 if self._inner_of(op, 4) < self.graph.tensor[op.operands[0]].shape[1] else 1
        inner = self._observed(op, 2, wider).extra_saved - self._observed(op, 1, wider).extra_saved
        return replace(
            op, saves=saves, extra_saved=whole.extra_saved, extra_rows=whole.extra_saved - inner
        )

    def _inner_of(self, op: Op, operand: int) -> int:
        """The inner width of one of the experts' weights, `up` (3) or `down` (4)."""
        return self.graph.tensor[op.operands[operand]].shape[_inner_dim(op, operand)]

    def _observed(self, op: Op, inner: int = 1, width: int = 1) -> AutogradFacts:
        """The autograd facts of the mixture with its widths multiplied."""
        operands = list(dict.fromkeys(op.operands))
        times = {op.operands[0]: {1: width}}
        for operand in (3, 4):
            dim = _inner_dim(op, operand)
            times[op.operands[operand]] = {dim: inner, 3 - dim: width}
        for bias, wider in zip(op.args[EXPERTS_BIASES], (inner, width), strict=False):
            times |= {bias.name: {1: wider}} if isinstance(bias, Ref) else {}
        leaves = []
        for name in operands:
            tensor = self.graph.tensor[name]
            each = times.get(name, {})
            shape = [size * each.get(dim, 1) for dim, size in enumerate(tensor.shape)]
            leaf = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device="meta")
            leaves.append(leaf.requires_grad_(tensor.requires_grad))

        def call(values: list[torch.Tensor]) -> list[torch.Tensor]:
            return call_op(op, dict(zip(operands, values, strict=True)), torch.device("meta"))

        return observe(call, leaves)

    def _producer(self, name: str) -> Op:
        if name not in self.graph.producer:
            raise _NotAMixtureError
        return self.graph.producer[name]

    def _made(self, name: str, kind: str) -> Op:
        op = self._producer(name)
        _require(op.kind == kind)
        return op

    def _only_reader(self, name: str, kind: str) -> Op:
        readers = self.graph.consumers[name]
        _require(len(readers) == 1 and readers[0].kind == kind and name not in self.graph.outputs)
        return readers[0]

    def _indexed(self, op: Op) -> tuple[int, ...]:
        given = op.args[1]
        assert isinstance(given, tuple)
        return tuple(d for d, arg in enumerate(given) if arg is not None)

    def _require_last(self, dim: Arg) -> None:
        _require(dim in (-1, len(self.graph.tensor[self.up.outputs[0]].shape) - 1))


def _inner_dim(op: Op, operand: int) -> int:
    """The dimension of inner width of `up` (3) or `down` (4), which has it last if it is turned."""
    turned = op.args[5]
    assert isinstance(turned, tuple)
    is_last = turned[operand - 3] == (operand == 4)
    return 2 if is_last else 1


def _matrix(graph: Graph, name: str) -> tuple[int, int]:
    shape = graph.tensor[name].shape
    if len(shape) != 2:
        raise _NotAMixtureError
    return shape[0], shape[1]


def _require(fact: bool) -> None:
    if not fact:
        raise _NotAMixtureError
