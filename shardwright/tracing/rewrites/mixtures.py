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

from shardwright.ir.graph import Graph, Op, Ref, whole_numbers
from shardwright.tracing.own_operators.experts import EXPERTS, GROUPED_KERNEL
from shardwright.tracing.rewrites.expert_steps import (
    NotAMixtureError,
    require,
    steps_between,
    with_facts,
)

_PRODUCTS = ("transformers.grouped_mm_fallback.default", GROUPED_KERNEL)
_GATHERING = "index"


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
        except NotAMixtureError:
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

        Raises `NotAMixtureError` if any operator is not as expected.
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
        require(halved.operands == (order,) and halved.args[1] == each)
        require(_matrix(graph, x)[0] == count and self._indexed(gather) == (0,))
        self.made, up_bias = self._biased(self.up, sort.outputs[0])
        self.returned, down_bias = self._biased(self.down, sort.outputs[0])
        steps = steps_between(self.graph, self.made, self.down, self.down.operands[0])
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
        require(self.up.target == self.down.target)
        return last, with_facts(op, graph.tensor)

    def _sort(self) -> Op:
        """The sort by expert, found from the products' offsets: cumulative counts of its result."""
        name = self.up.operands[2]
        for _ in range(6):
            op = self._producer(name)
            if op.kind == "sort":
                require(name == op.outputs[0] and len(self.graph.tensor[name].shape) == 1)
                return op
            require(op.kind in ("cumsum", "histc", "_to_copy", "bincount"))
            name = op.operands[0]
        raise NotAMixtureError

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
        require(of_rows and len(added.args) == 2 and not added.kwargs)
        shape = self.graph.tensor[product.operands[1]].shape[0], self.graph.tensor[name].shape[-1]
        require(_matrix(self.graph, bias) == shape)
        return added.outputs[0], Ref(bias)

    def _weight(self, product: Op) -> tuple[str, bool]:
        """The name of the experts' weights, and whether the product reads them transposed."""
        name = product.operands[1]
        op = self.graph.producer.get(name)
        if op is None or op.kind != "transpose":
            return name, False
        require({d % 3 for d in whole_numbers(op.args[1:3])} == {1, 2})
        return op.operands[0], True

    def _scored(self, order: str, shape: tuple[int, int]) -> tuple[str, Op]:
        """The name of the scores, and the operator that sums the scaled rows of each token."""
        scaled = self._only_reader(self.returned, "mul")
        column = next(name for name in scaled.operands if name != self.returned)
        sorted_scores = self._made(self._made(column, "unsqueeze").operands[0], _GATHERING)
        require(sorted_scores.operands[1] == order)
        scores = self._made(sorted_scores.operands[0], "view").operands[0]
        require(_matrix(self.graph, scores) == shape)
        back = self._only_reader(scaled.outputs[0], _GATHERING)
        require(back.operands[0] == scaled.outputs[0] and self._indexed(back) == (0,))
        inverse = self._made(back.operands[1], "index_put")
        require(inverse.operands[1] == order)
        require(self._producer(inverse.operands[2]).kind == "arange")
        per_token = self._only_reader(back.outputs[0], "view")
        require(self.graph.tensor[per_token.outputs[0]].shape[:2] == shape)
        total = self._only_reader(per_token.outputs[0], "sum")
        require(total.args[1:] == ((1,),) and not total.kwargs)
        return scores, total

    def _producer(self, name: str) -> Op:
        if name not in self.graph.producer:
            raise NotAMixtureError
        return self.graph.producer[name]

    def _made(self, name: str, kind: str) -> Op:
        op = self._producer(name)
        require(op.kind == kind)
        return op

    def _only_reader(self, name: str, kind: str) -> Op:
        readers = self.graph.consumers[name]
        require(len(readers) == 1 and readers[0].kind == kind and name not in self.graph.outputs)
        return readers[0]

    def _indexed(self, op: Op) -> tuple[int, ...]:
        given = op.args[1]
        assert isinstance(given, tuple)
        return tuple(d for d, arg in enumerate(given) if arg is not None)


def _matrix(graph: Graph, name: str) -> tuple[int, int]:
    shape = graph.tensor[name].shape
    if len(shape) != 2:
        raise NotAMixtureError
    return shape[0], shape[1]
