"""Inserts copies of the trace of a block's call for all equal calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from shardwright.tracing.decompose.constants import Constants
from shardwright.tracing.dedup import repeats
from shardwright.tracing.dedup.repeats import REPEATED, TracedCall

_OWN_FRAME = f'File "{repeats.__file__}"'
_DETACH = torch.ops.aten.detach.default


class NotInlinableError(Exception):
    """Raised for a program whose calls of repeated blocks cannot be replaced by copies."""


@dataclass(frozen=True)
class _BlockTrace:
    """The traced nodes of one call, between its operands and its results."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    left: tuple[fx.Node, ...]  # nodes of the operands after it: x.to(x.dtype) makes a new node
    results: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    stack: Mapping[str, Any]  # the modules around its nodes; the block is last


def inline_calls(program: ExportedProgram, traced_calls: Mapping[int, TracedCall]) -> None:
    """Remove the marker operators of all calls from `program`, in place.

    The end markers of a traced call are replaced by the results of its trace, those of any other
    call by a copy of the trace of the equal call. Raises `NotInlinableError` where that is
    impossible; the program must then be discarded.
    """
    graph = program.graph
    marks = {node.args[2]: node for node in graph.nodes if node.target is REPEATED}
    wanted = {key for call in traced_calls.values() for key in (*call.sizes, call.start) if key}
    if not wanted <= marks.keys():
        raise NotInlinableError("an operator that stands for a call is not in the graph itself")
    block_traces: dict[int, _BlockTrace] = {}
    constants = Constants(program)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for number, call in traced_calls.items():
        own = [marks.pop(key) for key in call.sizes]
        ends = _nodes(own[0], 0)
        if call.traced_number == number:
            block_traces[number] = _block_trace(marks[call.start], own, constants.names)
            results = block_traces[number].results
        else:
            block_trace = block_traces[call.traced_number]
            again = {constant: constants.duplicate(constant) for constant in block_trace.constants}
            results = _copied(order, own[0], block_trace, number, again)
        for mark, size in zip(own, call.sizes.values(), strict=True):
            _replace(graph, mark, results[:size])
            ends += results[:size]
            results = results[size:]
        _drop_detached(ends)
    for begin in marks.values():
        _replace(graph, begin, ())
    constants.sort()
    if len({node.name for node in graph.nodes}) < len(graph.nodes):
        raise NotInlinableError("two nodes have one name")


def _block_trace(begin: fx.Node, own: Sequence[fx.Node], constants: frozenset[str]) -> _BlockTrace:
    """The trace of a call between its start marker `begin` and its end markers `own`."""
    operands, (*left, node) = _nodes(begin, 0), _nodes(own[0], 0)
    nodes = []
    while (node := node.next) is not own[0]:
        nodes.append(node)
    results = tuple(result for mark in own for result in _nodes(mark, 1))
    known = {*operands, *nodes}
    if not known.issuperset((*results, *left)):
        raise NotInlinableError("a call has results that are not its own")
    if any(node.op == "get_attr" for node in nodes):
        raise NotInlinableError(
            "a call has a graph within, whose operators say where they come from"
        )
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in known)
    if not constants.issuperset(node.name for node in read):
        raise NotInlinableError("a call reads more than its operands")
    stack = own[0].meta["nn_module_stack"]
    return _BlockTrace(tuple(operands), tuple(nodes), tuple(left), results, tuple(read), stack)


def _copied(
    order: Mapping[fx.Node, int],
    mark: fx.Node,
    block_trace: _BlockTrace,
    number: int,
    env: dict[fx.Node, fx.Node],
) -> tuple[fx.Node, ...]:
    """Insert a copy of `block_trace` at `mark` and return its results.

    `order` has the position of each node of the graph before any copy; `env` maps constants to
    their duplicates.
    """
    for old, new in zip(block_trace.operands, _nodes(mark, 0), strict=True):
        if env.setdefault(old, new) is not new:
            raise NotInlinableError("a call has two tensors where the one it is like has one")
    with mark.graph.inserting_before(mark):
        for node in block_trace.nodes:
            env[node] = made = mark.graph.node_copy(node, env.__getitem__)
            made.meta.update(_origin(node, mark, block_trace, number))
    for old, new in zip(_nodes(mark, 0), (env[node] for node in block_trace.left), strict=True):
        if old is not new:
            old.replace_all_uses_with(new, lambda user: order.get(user, -1) > order[mark])
    return tuple(env[result] for result in block_trace.results)


def _origin(node: fx.Node, mark: fx.Node, block_trace: _BlockTrace, number: int) -> dict[str, Any]:
    """Metadata of a copied node: its module stack, its stack trace and its function.

    Both stacks are those of `mark` outside of the block and those of `node` inside.
    """
    here = mark.meta["nn_module_stack"]
    (old, _), (new, _) = (list(stack.values())[-1] for stack in (block_trace.stack, here))
    stack = dict(here)
    for key, (path, kind) in list(node.meta.get("nn_module_stack", {}).items())[
        len(block_trace.stack) :
    ]:
        stack[f"{number}/{key}"] = (new + path.removeprefix(old), kind)
    origin: dict[str, Any] = {"nn_module_stack": stack}
    if trace := node.meta.get("stack_trace"):
        around, inside = mark.meta["stack_trace"], trace.find(_OWN_FRAME)
        if inside < 0:
            raise NotInlinableError("nothing says which lines are inside a block")
        origin["stack_trace"] = around[: around.find(_OWN_FRAME)] + trace[inside:]
    if function := node.meta.get("torch_fn"):
        origin["torch_fn"] = (f"{function[0]}/{number}", *function[1:])
    return origin


def _nodes(mark: fx.Node, at: int) -> list[fx.Node]:
    """Argument `at` of a marker operator: 0 for the operands of the call, 1 for its results."""
    return list(mark.args[at])  # type: ignore[arg-type]


def _replace(graph: fx.Graph, mark: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replace the results of `mark` by `results`, if there are any, and remove `mark`."""
    for node in list(mark.users):
        if results:
            node.replace_all_uses_with(results[node.args[1]])  # type: ignore[index]
        graph.erase_node(node)
    graph.erase_node(mark)


def _drop_detached(nodes: Iterable[fx.Node]) -> None:
    """Remove detach nodes without readers, as export does; export keeps all other nodes."""
    for node in nodes:
        while node.target is _DETACH and not node.users:
            read = node.all_input_nodes[0]
            node.graph.erase_node(node)
            node = read
