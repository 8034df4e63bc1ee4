"""A program as a `torch.fx.GraphModule`, which runs eagerly or through `torch.compile`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from shardwright.capture.operators import operator_of, to_torch
from shardwright.ir.graph import Op
from shardwright.lower.pieces import reads, writes
from shardwright.lower.program import (
    Compute,
    Dropout,
    Instruction,
    Load,
    Program,
    Redistribute,
    Uniform,
)

Make = Callable[[Redistribute | Dropout | Uniform | Compute], nn.Module]

_RANDOM_STATE = "random_state"


def to_module(program: Program, device: torch.device, make: Make) -> fx.GraphModule:
    """A module called with one tensor per leaf, in order, and then the random state.

    Parameters are given as local tiles in their atoms' shape, everything else
    whole. It returns the outputs, then the new contents of updated buffers.
    `make` gives the modules that redistribute, drop out and draw, and those
    that compute and regather: these are called with the values to redistribute
    again, the results of the first time, and the operator's arguments.
    """
    results = [*program.outputs, *(value for _, value in program.updates)]
    writer = _Writer(device, make, [*program.leaves, _RANDOM_STATE])
    needed = {name: len(program.instructions) for name in results}  # by which instruction last
    for i, instruction in enumerate(program.instructions):
        needed.update((name, max(i, needed.get(name, 0))) for name in _reads(instruction))
    numbered = enumerate(zip(program.instructions, program.pieces, strict=True))
    for piece, group in groupby(numbered, key=lambda item: item[1][1]):
        members = [(i, instruction) for i, (instruction, _) in group]
        instructions = [instruction for _, instruction in members]
        if not piece:
            for instruction in instructions:
                writer.write(instruction)
            continue
        made = [name for instruction in instructions for name in writes(instruction)]
        last, _ = members[-1]
        writer.recompute(piece, instructions, [n for n in made if needed.get(n, -1) > last])
    return writer.module(results)


class _Recomputed(nn.Module):
    """A piece of a program that keeps its inputs alone, and runs again in the backward pass."""

    def __init__(self, piece: fx.GraphModule) -> None:
        super().__init__()
        self.piece = piece

    def forward(self, *given: torch.Tensor) -> Any:
        """The results of the piece. It draws no random numbers but those of its inputs."""
        return checkpoint(self.piece, *given, use_reentrant=False, preserve_rng_state=False)


class _Writer:
    """A graph while it is written."""

    def __init__(self, device: torch.device, make: Make, inputs: Sequence[str]) -> None:
        self.device = device
        self.make = make
        self.root, self.graph = nn.Module(), fx.Graph()
        self.nodes = {name: self.graph.placeholder(f"leaf_{i}") for i, name in enumerate(inputs)}
        self.sources: dict[str, str] = {}  # result of a redistribution -> what was redistributed
        self.count = 0

    def module(self, results: Sequence[str]) -> fx.GraphModule:
        self.graph.output(tuple(self.nodes[name] for name in results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, class_name="Program")

    def recompute(
        self, piece: int, instructions: Sequence[Instruction], results: Sequence[str]
    ) -> None:
        """Write `instructions` as a module of their own, of which `results` are needed."""
        made = {name for instruction in instructions for name in writes(instruction)}
        needed = [name for instruction in instructions for name in _reads(instruction)]
        inputs = [name for name in dict.fromkeys(needed) if name not in made]
        inner = _Writer(self.device, self.make, inputs)
        for instruction in instructions:
            inner.write(instruction)
        name = f"piece_{piece}"
        self.root.add_module(name, _Recomputed(inner.module(results)))
        given = tuple(self.nodes[value] for value in inputs)
        self._results(results, self.graph.call_module(name, given), always=True)

    def write(self, instruction: Instruction) -> None:
        """One instruction and its results."""
        self.count += 1
        nodes = self.nodes
        if isinstance(instruction, Load):
            leaf = nodes[instruction.leaf]
            nodes[instruction.result] = self.graph.call_method("view", (leaf, instruction.shape))
        elif isinstance(instruction, Redistribute):
            one = (nodes[instruction.value],)
            nodes[instruction.result] = self._call("redistribute", instruction, one)
            self.sources[instruction.result] = instruction.value
        elif isinstance(instruction, Dropout | Uniform):
            given = tuple(nodes[name] for name in _reads(instruction))
            node = self._call(instruction.op.kind, instruction, given)
            nodes[instruction.op.outputs[0]] = node
        else:
            op = instruction.op
            args = tuple(to_torch(a, nodes, self.device) for a in op.args)
            kwargs = {key: to_torch(value, nodes, self.device) for key, value in op.kwargs}
            if instruction.regathers:
                again = tuple(nodes[self.sources[result]] for result in instruction.regathers)
                first = tuple(nodes[result] for result in instruction.regathers)
                node = self._call(op.kind, instruction, (again, first, args, kwargs))
            else:
                node = self.graph.call_function(operator_of(op.target), args, kwargs)
            self._results(op.outputs, node, always=not _is_single(op))

    def _call(
        self, kind: str, instruction: Redistribute | Dropout | Uniform | Compute, args: Any
    ) -> fx.Node:
        name = f"{kind}_{self.count}"
        self.root.add_module(name, self.make(instruction))
        return self.graph.call_module(name, args)

    def _results(self, names: Sequence[str], node: fx.Node, *, always: bool) -> None:
        """Name the parts of a result; a single one is no tuple, unless it `always` is."""
        if not always:
            self.nodes[names[0]] = node
            return
        for i, name in enumerate(names):
            self.nodes[name] = self.graph.call_function(operator.getitem, (node, i))


def _reads(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, Dropout | Uniform):
        return (*reads(instruction), _RANDOM_STATE)
    return reads(instruction)


def _is_single(op: Op) -> bool:
    return len(op.outputs) == 1 and op.outputs[0] == op.name
