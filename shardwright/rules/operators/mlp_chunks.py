"""Rewrites MLPs as one operator each, which works in chunks of rows.

Products of one input with one or two weights, or with one that holds both, operators that work
element by element, and the product with a last weight become `shardwright.chunked_mlp`. Tensors of
the inner width (tokens x inner features: products, activation, their gradients) then exist for one
chunk of a rank's rows at a time; the input and the weights are all that the backward pass keeps.

Chunks are of rows, not of inner features: results are those of the whole MLP row by row, and what
adds up over chunks, the gradients of the weights, does not grow with the sequence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from shardwright.ir.graph import Arg, Graph, Op, Ref, Source, json_argument
from shardwright.rules.operators.steps import PART
from shardwright.rules.operators.table import ELEMENTWISE, LINEAR
from shardwright.rules.operators.views import RESHAPES

CHUNKED_MLP = "shardwright.chunked_mlp.default"
# args: x, weights of its products, their biases, last weight, its bias, turned, chunks, steps, and
# with dropout the number that this has among operators that draw
DOWN, TURNED, CHUNKS, STEPS, _NUMBER = 3, 5, 6, 7, 8  # positions among its arguments

_MOST_PRODUCTS = 2
_SPLITS = ("split", "split_with_sizes", "chunk")
_POINTWISE = (ELEMENTWISE | LINEAR | {"add", "sub", "mul", "div"}) - {"detach"}


def number_drawn_by(op: Op) -> int | None:
    """The number of the dropout inside of an MLP in chunks among operators that draw; None if none.

    It is the last argument.
    """
    if op.target != CHUNKED_MLP or len(op.args) <= _NUMBER:
        return None
    number = op.args[_NUMBER]
    assert isinstance(number, int)
    return number


class MlpChunksError(ValueError):
    """A graph whose MLPs cannot be computed in chunks."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with a weight: `linear(x, weight, bias)`, or `addmm` of a weight (in, out)."""

    op: Op
    x: str
    weight: str
    bias: Arg
    turned: bool


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Products of one input, the operators on them in order, and the last product."""

    products: tuple[_Product, ...]
    between: tuple[Op, ...]
    last: _Product
    steps: str

    @property
    def dropout(self) -> Op | None:
        """The dropout inside, of which there is one at most."""
        return next((op for op in self.between if op.kind == "dropout"), None)

    @property
    def inside(self) -> tuple[Op, ...]:
        """The operators that the last one takes the place of."""
        return (*(one.op for one in self.products), *self.between)


def with_mlp_chunks(graph: Graph, count: int) -> Graph:
    """`graph` with each MLP that permits it in `count` chunks.

    Raises `MlpChunksError`, with the reason, if none does.
    """
    numerics = replace(graph.numerics, mlp_chunks=count)
    if count == 1:
        return replace(graph, numerics=numerics)
    found, reasons = _found(graph)
    if not found:
        why = reasons[0] if reasons else "the model has no two products with what is between them"
        raise MlpChunksError(f"mlp_chunks={count} is not possible: {why}; leave it out")
    made = {one.last.op.name: _operator(one, count, graph) for one in found}
    gone = {op.name for one in found for op in one.inside}
    dropped = {name for one in found for op in one.inside for name in op.outputs}
    return replace(
        graph,
        ops=tuple(made.get(op.name, op) for op in graph.ops if op.name not in gone),
        values=tuple(value for value in graph.values if value.name not in dropped),
        numerics=numerics,
    )


def largest_mlp(graph: Graph) -> tuple[int, int]:
    """Rows, and bytes of one row's tensors of inner width, where these are most; else zeros.

    They are what exists at once in the backward pass: products, what is computed of them, and
    their gradients.
    """
    sizes = [(0, 0)]
    for one in _found(graph)[0]:
        tensors = [graph.tensor[op.outputs[0]] for op in one.inside]
        own = [tensor for tensor in tensors if not tensor.alias_of]
        rows = own[0].num_elements // own[0].shape[-1]
        sizes.append((rows, 2 * sum(tensor.bytes for tensor in own) // rows))
    return max(sizes, key=lambda size: size[0] * size[1])


def _found(graph: Graph) -> tuple[list[_Mlp], list[str]]:
    """The MLPs of a graph, and why others are none."""
    found, reasons = list[_Mlp](), list[str]()
    for op in graph.ops:
        last = _product(graph, op)
        if last is None:
            continue
        try:
            one = _mlp(graph, last)
        except MlpChunksError as e:
            reasons.append(str(e))
            continue
        found += [] if one is None else [one]
    return found, reasons


def _product(graph: Graph, op: Op) -> _Product | None:
    """The product of an operator; None for another one."""
    if op.kwargs or len(op.outputs) != 1:
        return None
    if op.kind == "linear" and len(op.args) in (2, 3):
        x, weight, *bias = op.args
        bias, turned = bias or [None], True
    elif op.kind == "addmm" and len(op.args) == 3:
        x, weight, bias, turned = op.args[1], op.args[2], [op.args[0]], False
    else:
        return None
    if not isinstance(x, Ref) or not isinstance(weight, Ref):
        return None
    shapes = [graph.tensor[name].shape for name in (op.outputs[0], weight.name)]
    if isinstance(bias[0], Ref) and graph.tensor[bias[0].name].shape != shapes[0][-1:]:
        return None
    if len(shapes[1]) != 2:
        return None
    return _Product(op, x.name, weight.name, bias[0], turned)


def _mlp(graph: Graph, last: _Product) -> _Mlp | None:
    """The MLP that ends in a product; None where no product is before it.

    Raises `MlpChunksError` where one is, and something else is between that permits no chunks.
    """
    products, between, odd = _before(graph, last)
    if not products:
        return None
    source = last.op.source
    if odd:
        raise MlpChunksError(f"the MLP of {source} has {odd} inside")
    if all(op.kind in (*RESHAPES, *_SPLITS) for op in between):
        return None
    if len(products) > _MOST_PRODUCTS or len({one.x for one in products}) > 1:
        raise MlpChunksError(f"the MLP of {source} has not one input of one or two products")
    if refused := _refused_dropout(graph, between):
        raise MlpChunksError(f"the MLP of {source} has {refused}")
    inside = {op.name for op in (*between, *(one.op for one in products))}
    returned = {*graph.outputs, *(value for _, value in graph.updates)}
    for op in (*between, *(one.op for one in products)):
        for name in op.outputs:
            others = [r for r in graph.consumers[name] if r.name not in {*inside, last.op.name}]
            if others or name in returned:
                by = f"read by {others[0].source}" if others else "returned"
                raise MlpChunksError(f"tensors inside of the MLP of {source} are also {by}")
    x, made = graph.tensor[products[0].x], graph.tensor[last.op.outputs[0]]
    if x.shape != made.shape or x.dtype != made.dtype:
        raise MlpChunksError(f"the MLP of {source} changes shape or dtype of its input")
    return _Mlp(products, between, last, _steps(graph, products, between, source))


def _refused_dropout(graph: Graph, between: Sequence[Op]) -> str:
    """The reason that dropout inside is not drawn in parts; empty if it is, or there is none."""
    drops = [op for op in between if op.kind == "dropout"]
    if drops and graph.numerics.rng == "fast":
        return "dropout inside, which rng='fast' draws as a whole"
    if any(op.args[1] == 1.0 for op in drops):
        return "dropout inside that keeps nothing"
    return "dropout inside more than once" if len(drops) > 1 else ""


def _before(graph: Graph, last: _Product) -> tuple[tuple[_Product, ...], tuple[Op, ...], str]:
    """Products before one, the operators between in order, and what permits no chunks.

    The last is the kind of an operator, or "other tensors".
    """
    inner = graph.tensor[last.x]
    wanted: dict[str, Op] = {}
    products: dict[str, _Product] = {}
    left = [last.x]
    while left and len(products) <= _MOST_PRODUCTS:
        name = left.pop()
        op = graph.producer.get(name)
        if op is None:
            return tuple(products.values()), (), "other tensors"
        if op.name in wanted or op.name in products:
            continue
        if (several := _split_product(graph, op)) is not None:
            wanted[op.name], products[several.op.name] = op, several
            continue
        made = graph.tensor[name]
        as_wide = made.shape[-1:] == inner.shape[-1:] and made.num_elements == inner.num_elements
        if as_wide and (one := _product(graph, op)) is not None:
            products[op.name] = one
        elif as_wide and op.operands and op.kind in (*_POINTWISE, *RESHAPES, "dropout"):
            wanted[op.name] = op
            left += op.operands
        else:
            return tuple(products.values()), (), op.kind
    between = tuple(op for op in graph.ops if op.name in wanted) if products else ()
    return tuple(products[op.name] for op in graph.ops if op.name in products), between, ""


def _split_product(graph: Graph, op: Op) -> _Product | None:
    """The product whose features an operator splits into equal parts; None for another operator."""
    if op.kind not in _SPLITS or len(op.operands) != 1:
        return None
    whole = graph.tensor[op.operands[0]].shape
    part = (*whole[:-1], whole[-1] // len(op.outputs)) if whole else ()
    source = graph.producer.get(op.operands[0])
    if source is None or any(graph.tensor[name].shape != part for name in op.outputs):
        return None
    return _product(graph, source)


def _steps(
    graph: Graph, products: Sequence[_Product], between: Sequence[Op], source: Source
) -> str:
    """The operators between as JSON for `tracing/own_operators/chunked_mlp.py`, without views."""
    number = {one.op.outputs[0]: i for i, one in enumerate(products)}
    steps: list[list[object]] = []
    for op in between:
        if op.kind in RESHAPES:
            number[op.outputs[0]] = number[op.operands[0]]
            continue
        if op.kind in _SPLITS:
            for i, name in enumerate(op.outputs):
                number[name] = len(products) + len(steps)
                given = {"value": number[op.operands[0]]}
                steps.append([PART, [given, i, len(op.outputs)], {}])
            continue
        try:
            # The number of what draws is none of the steps, which are those of equal layers.
            given_args = op.args[:-1] if op.kind == "dropout" else op.args
            args = [json_argument(arg, number) for arg in given_args]
            kwargs = {key: json_argument(arg, number) for key, arg in op.kwargs}
        except ValueError as e:
            raise MlpChunksError(f"in the MLP of {source}, {e}") from e
        number[op.outputs[0]] = len(products) + len(steps)
        steps.append([op.target, args, kwargs])
    return json.dumps(steps)


def _operator(one: _Mlp, count: int, graph: Graph) -> Op:
    """The operator of an MLP, at the place and with the name of its last product."""
    last = one.last
    args: tuple[Arg, ...] = (
        Ref(one.products[0].x),
        tuple(Ref(product.weight) for product in one.products),
        tuple(product.bias for product in one.products),
        Ref(last.weight),
        last.bias,
        tuple(product.turned for product in (*one.products, last)),
        count,
        one.steps,
        *([] if one.dropout is None else [one.dropout.args[-1]]),
    )
    source = replace(last.op.source, module=_common([*one.inside, last.op]))
    found = replace(last.op, target=CHUNKED_MLP, args=args, kwargs=(), source=source, extra_saved=0)
    trained = graph.tensor[last.op.outputs[0]].requires_grad
    unread = {last.bias.name} if isinstance(last.bias, Ref) else set()
    saves = tuple(name for name in dict.fromkeys(found.operands) if name not in unread)
    return replace(found, saves=saves if trained else ())


def _common(ops: Sequence[Op]) -> str:
    """The path of the innermost module that has all operators."""
    paths = [op.source.module.split(".") for op in ops]
    same = takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in same)
