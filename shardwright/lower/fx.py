"""A program as a `torch.fx.GraphModule`, which runs eagerly or through `torch.compile`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx, nn

from shardwright.capture.operators import operator_of, to_torch
from shardwright.ir.graph import Op
from shardwright.lower.program import Compute, Dropout, Load, Program, Redistribute, Uniform


def to_module(
    program: Program,
    device: torch.device,
    make: Callable[[Redistribute | Dropout | Uniform | Compute], nn.Module],
) -> fx.GraphModule:
    """A module called with one tensor per leaf, in order, and then the random state.

    Parameters are given as local tiles in their atoms' shape, everything else
    whole. It returns the outputs, then the new contents of updated buffers.
    `make` gives the modules that redistribute, drop out and draw, and those
    that compute and regather: these are called with the values to redistribute
    again, the results of the first time, and the operator's arguments.
    """
    root, graph = nn.Module(), fx.Graph()
    sources: dict[str, str] = {}  # result of a redistribution -> what was redistributed
    nodes: dict[str, fx.Node] = {
        name: graph.placeholder(f"leaf_{i}") for i, name in enumerate(program.leaves)
    }
    random_state = graph.placeholder("random_state")
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Load):
            leaf = nodes[instruction.leaf]
            node = graph.call_method("view", (leaf, instruction.shape))
            nodes[instruction.result] = node
        elif isinstance(instruction, Redistribute):
            name = f"redistribute_{number}"
            root.add_module(name, make(instruction))
            node = graph.call_module(name, (nodes[instruction.value],))
            nodes[instruction.result] = node
            sources[instruction.result] = instruction.value
        elif isinstance(instruction, Dropout | Uniform):
            name = f"{instruction.op.kind}_{number}"
            root.add_module(name, make(instruction))
            given = (*(nodes[operand] for operand in instruction.op.operands), random_state)
            nodes[instruction.op.outputs[0]] = graph.call_module(name, given)
        else:
            op = instruction.op
            args = tuple(to_torch(a, nodes, device) for a in op.args)
            kwargs = {key: to_torch(value, nodes, device) for key, value in op.kwargs}
            if instruction.regathers:
                name = f"{op.kind}_{number}"
                root.add_module(name, make(instruction))
                again = tuple(nodes[sources[result]] for result in instruction.regathers)
                first = tuple(nodes[result] for result in instruction.regathers)
                node = graph.call_module(name, (again, first, args, kwargs))
            else:
                node = graph.call_function(operator_of(op.target), args, kwargs)
            _results(graph, op, node, nodes)
    results = [*program.outputs, *(value for _, value in program.updates)]
    graph.output(tuple(nodes[name] for name in results))
    graph.lint()
    return fx.GraphModule(root, graph, class_name="Program")


def _results(graph: fx.Graph, op: Op, node: fx.Node, nodes: dict[str, fx.Node]) -> None:
    if len(op.outputs) == 1 and op.outputs[0] == op.name:
        nodes[op.name] = node
        return
    for i, name in enumerate(op.outputs):
        nodes[name] = graph.call_function(operator.getitem, (node, i))
