"""Decomposes each distinct operator call once, so that the time hardly grows with depth.

`ExportedProgram.run_decompositions` traces the whole program again. If no operator writes to its
operands, each call can be decomposed separately. So a small program, which makes every distinct
call once, is decomposed, and its parts are copied for the calls of the whole program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from shardwright.tracing.export.operators import MAKING, OVERLOAD

Table = Mapping[Any, Callable[..., Any]]
aten: Any = torch.ops.aten
_WORTH = 8.0  # the small program is used from this many nodes per distinct call
_KEPT = ("nn_module_stack", "stack_trace", "torch_fn")  # metadata taken from the original call
# Writes whose results have the dtype of what is written to, and operators that return them.
_RETURNING = {
    aten.index_put_.default: aten.index_put.default,
    aten.index_add_.default: aten.index_add.default,
    aten.index_copy_.default: aten.index_copy.default,
    aten.scatter_.src: aten.scatter.src,
    aten.scatter_.value: aten.scatter.value,
    aten.scatter_add_.default: aten.scatter_add.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.copy_.default: aten.copy.default,
    aten.fill_.Scalar: aten.fill.Scalar,
    aten.fill_.Tensor: aten.fill.Tensor,
}
# Views of a part of a tensor, and the operators that return it with other values in this part.
_PARTS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
_ARITHMETIC = {  # the same of operands of one dtype
    getattr(getattr(aten, f"{name}_"), kind): getattr(getattr(aten, name), kind)
    for name in ("add", "sub", "mul", "div")
    for kind in ("Tensor", "Scalar")
}


@dataclass(frozen=True)
class Functional:
    """A functional graph of ATen operators with its signature, and its constants by name."""

    graph: fx.Graph
    graph_signature: ExportGraphSignature
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class _Call:
    """An operator with its arguments, in which tensors are replaced by their indices."""

    target: Any
    args: Any
    kwargs: Any
    operands: tuple[torch.Tensor, ...]  # of the first such call
    results: int

    def on(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        def fill(arg: Any) -> Any:
            if isinstance(arg, _OperandIndex):
                return tensors[arg.at]
            return type(arg)(fill(a) for a in arg) if isinstance(arg, list | tuple) else arg

        kwargs = {key: fill(value) for key, value in self.kwargs.items()}
        result = self.target(*fill(self.args), **kwargs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)


@dataclass(frozen=True)
class _OperandIndex:
    """A placeholder for the operand at this index."""

    at: int


@dataclass(frozen=True)
class _Expansion:
    """The decomposition of a call: its inputs, nodes and results in the small program."""

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]


class _Calls(nn.Module):
    """A module that makes every distinct call once, on separate inputs."""

    def __init__(self, calls: tuple[_Call, ...]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        results: list[Any] = []
        at = 0
        for call in self.calls:
            results += call.on(tensors[at : at + len(call.operands)])
            at += len(call.operands)
        return tuple(results)


def decomposed(program: ExportedProgram, table: Table) -> Functional | None:
    """`program` decomposed by `table`, call by call; None if it must be decomposed at once.

    The latter is the case if an operator writes to an operand, if a node calls no ATen operator or
    has a result that is not a tensor of fixed sizes, or if too few calls are equal. Writes to
    tensors that were made for them are replaced in `program` before.
    """
    _return_writes(program)
    if not all(_is_cacheable(node) for node in program.graph.nodes):
        return None
    distinct: dict[Any, _Call] = {}
    calls = {
        node: _numbered(node, distinct)
        for node in program.graph.nodes
        if node.op == "call_function"
        and not _is_selection(node)
        and not _is_core_op(node.target, table)
    }
    if len(program.graph.nodes) < _WORTH * len(distinct):
        return None
    expansions = _expansions(tuple(distinct.values()), table)
    if expansions is None:
        return None
    by_key = dict(zip(distinct, expansions, strict=True))
    graph = _spliced(
        program.graph, {node: (by_key[key], operands) for node, (key, operands) in calls.items()}
    )
    return Functional(graph, program.graph_signature, program.constants)


def decomposed_at_once(program: ExportedProgram, table: Table) -> Functional:
    """`program` decomposed by `table`, by torch's own pass over the whole program."""
    program = program.run_decompositions(dict(table))
    return Functional(program.graph, program.graph_signature, program.constants)


def _return_writes(program: ExportedProgram) -> None:
    """Replace writes to tensors that share memory with no other by operators that return a result.

    A permutation is inverted so: `torch.empty_like(order).index_put_((order,), positions)`,
    weights of experts are normalised so: `weights.div_(weights.sum(-1, keepdim=True))`, and labels
    are shifted so: `shifted[..., 1:] = labels[..., :-1]`.
    """
    graph = program.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        returning = _returning(node)
        if returning is None:
            continue
        part = _written_part(node)
        written = node.args[0] if part is None else part.all_input_nodes[0]
        before = (user for user in written.users if order[user] < order[node] and user is not part)
        if not _is_new(written) or not all(map(_makes, before)):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(returning, node.args, node.kwargs)
            made.meta, order[made] = dict(node.meta), order[node]
            if part is not None:
                rest = written, made, *part.args[1:]
                made = graph.call_function(_PARTS[part.target], rest, part.kwargs)
                made.meta, order[made] = {**node.meta, "val": written.meta["val"]}, order[node]
        later = {user for user in written.users if order.get(user, 0) >= order[node]} - {made}
        written.replace_all_uses_with(made, delete_user_cb=later.__contains__)
        if part is None:
            node.replace_all_uses_with(made)
        graph.erase_node(node)
    program.graph_module.recompile()


def _returning(node: fx.Node) -> Any:
    """The operator that returns what `node` writes, in the same dtype; None if there is none."""
    if node.op != "call_function":
        return None
    if node.target in _ARITHMETIC:
        tensors = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
        same = all(isinstance(one, torch.Tensor) for one in tensors)
        return _ARITHMETIC[node.target] if same and len({t.dtype for t in tensors}) == 1 else None
    return _RETURNING.get(node.target)


def _written_part(node: fx.Node) -> fx.Node | None:
    """The view of a part of a tensor that `node` writes to, and nothing else reads; None if none.

    Nothing of it may have a gradient, which the view's metadata do not say before the write.
    """
    view = node.args[0]
    if not isinstance(view, fx.Node) or view.target not in _PARTS or len(view.users) > 1:
        return None
    values = [one.meta["val"] for one in (*node.all_input_nodes, *view.all_input_nodes)]
    fixed = all(isinstance(one, torch.Tensor) and not one.requires_grad for one in values)
    return view if fixed and not node.users else None


def _is_new(node: fx.Node) -> bool:
    """Whether a tensor shares memory with no other."""
    if node.op == "call_function" and node.target is operator.getitem:
        (node,) = node.all_input_nodes
    return _makes(node)


def _makes(node: fx.Node) -> bool:
    """Whether the results of a node share memory with no other tensor."""
    if node.op != "call_function" or not isinstance(node.target, OVERLOAD):
        return False
    name = node.target.__name__.split(".")[0]
    return name in MAKING or node.target in (*_RETURNING.values(), *_PARTS.values())


def _is_cacheable(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if _is_selection(node):
        return True
    name = getattr(node.target, "__name__", "").split(".")[0]  # e.g. add_ or __and__
    values = node.meta.get("val")
    values = values if isinstance(values, tuple | list) else (values,)
    return (
        isinstance(node.target, OVERLOAD)
        and (not name.endswith("_") or name.endswith("__"))
        and all(_is_fixed(value) for value in values)
    )


def _is_core_op(target: Any, table: Table) -> bool:
    """Whether decomposition leaves an operator unchanged: it is of Core ATen and not in `table`."""
    return torch.Tag.core in target.tags and target not in table


def _is_selection(node: fx.Node) -> bool:
    """Whether a node computes nothing: it selects a result, or detaches a tensor without grad."""
    if node.target is not aten.detach_.default:
        return node.target is operator.getitem
    made = node.args[0]  # export detaches constants in the code, which require no gradient
    return isinstance(made, fx.Node) and not made.meta["val"].requires_grad


def _is_fixed(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape)


def _numbered(node: fx.Node, distinct: dict[Any, _Call]) -> tuple[Any, tuple[fx.Node, ...]]:
    """The key of a call, and its operands; the first call of each key is added to `distinct`."""
    numbers: dict[fx.Node, int] = {}

    def numbered(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return _OperandIndex(numbers.setdefault(arg, len(numbers)))
        if isinstance(arg, list | tuple):
            return [numbered(a) for a in arg]
        return arg

    args = numbered(list(node.args))
    kwargs = {name: numbered(value) for name, value in node.kwargs.items()}
    key = (
        node.target,
        _hashable(args),
        tuple((name, _hashable(value)) for name, value in kwargs.items()),
        tuple(_tensor_key(operand.meta["val"]) for operand in numbers),
    )
    if key not in distinct:
        value = node.meta.get("val")
        results = len(value) if isinstance(value, tuple | list) else 1
        operands = tuple(operand.meta["val"] for operand in numbers)
        distinct[key] = _Call(node.target, args, kwargs, operands, results)
    return key, tuple(numbers)


def _hashable(arg: Any) -> Any:
    if isinstance(arg, list):
        return tuple(_hashable(a) for a in arg)
    return (type(arg), arg)  # 1 is not 1.0, nor True


def _tensor_key(value: torch.Tensor) -> Any:
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad


def _expansions(calls: tuple[_Call, ...], table: Table) -> list[_Expansion] | None:
    """The decomposition of each call; None if one has constants or writes to an operand."""
    inputs = tuple(_fresh_like(operand) for call in calls for operand in call.operands)
    small = torch.export.export(_Calls(calls), inputs, strict=False)
    small = small.run_decompositions(dict(table))
    signature = small.graph_signature
    if any(spec.kind is not InputKind.USER_INPUT for spec in signature.input_specs):
        return None
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return None
    placeholders = [node for node in small.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in small.graph.nodes if node.op == "output")
    order = {node: i for i, node in enumerate(small.graph.nodes)}
    given, results = iter(placeholders), iter(output.args[0])
    expansions = []
    for call in calls:
        own = tuple(next(given) for _ in call.operands)
        returned = tuple(next(results) for _ in range(call.results))
        nodes = sorted(_between(own, returned), key=order.__getitem__)
        expansions.append(_Expansion(own, tuple(nodes), returned))
    return expansions


def _fresh_like(value: torch.Tensor) -> torch.Tensor:
    """A new fake tensor with the metadata of `value`."""
    fresh = value.new_empty_strided(value.shape, value.stride())
    return fresh.requires_grad_(value.requires_grad)


def _between(inputs: tuple[fx.Node, ...], results: tuple[fx.Node | None, ...]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node for node in results if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in inputs:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _spliced(
    graph: fx.Graph, expansions: Mapping[fx.Node, tuple[_Expansion, tuple[fx.Node, ...]]]
) -> fx.Graph:
    """`graph` with every call replaced by its expansion."""
    made = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        elif node.target is aten.detach_.default:
            env[node] = env[node.args[0]]
        elif node in expansions:
            expansion, operands = expansions[node]
            results = _insert_copy(made, node, expansion, [env[operand] for operand in operands])
            several = isinstance(node.meta.get("val"), tuple | list)
            env[node] = results if several else results[0]
        else:
            env[node] = made.node_copy(node, env.__getitem__)
    return made


def _insert_copy(
    made: fx.Graph, node: fx.Node, expansion: _Expansion, operands: list[Any]
) -> list[Any]:
    """Insert a copy of `expansion`, applied to `operands`, for `node`; returns its results."""
    own = dict(zip(expansion.inputs, operands, strict=True))
    for inner in expansion.nodes:
        copy = own[inner] = made.node_copy(inner, own.__getitem__)
        copy.meta = {name: node.meta[name] for name in _KEPT if name in node.meta}
        copy.meta["val"] = inner.meta.get("val")
    return [None if result is None else own[result] for result in expansion.results]
