"""Converts a program to a `torch.fx.GraphModule`, which runs eagerly or through `torch.compile`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from shardwright.ir.graph import FUNCTION
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    DroppedMlp,
    Instruction,
    Joint,
    Load,
    Program,
    RecomputedSegment,
    Redistribute,
    RunModule,
    SharedAttention,
    Uniform,
    reads,
    writes,
)
from shardwright.rules.operators.loss_chunks import LINEAR_CROSS_ENTROPY
from shardwright.rules.operators.mlp_chunks import CHUNKED_MLP
from shardwright.runtime.graph_modules.fused_norms import (
    FusedNorm,
    arguments,
    batch_norm,
    fused_norms,
    results_of,
)
from shardwright.tracing.export.operators import operator_of, to_torch

Draws = Dropout | Uniform | Attention | DroppedMlp | RunModule  # they take the random state
# Those that need a module each; of `Compute` those that route, and some operators.
Special = Draws | Redistribute | Compute | Joint | SharedAttention

_OWN_MODULES = (FUNCTION, LINEAR_CROSS_ENTROPY, CHUNKED_MLP)
_RANDOM_STATE = "random state"
_NUMBERS = "numbers"


def to_module(
    program: Program, device: torch.device, make: Callable[[Special], nn.Module]
) -> fx.GraphModule:
    """A module called with one tensor per leaf, in order, and then the random state.

    Parameters are passed as local tiles, all other leaves whole. It returns the outputs, then the
    new contents of updated buffers. `make` creates the modules of instructions that are not plain
    operators.
    """
    results = [*program.outputs, *(value for _, value in program.updates)]
    writer = _Writer(program.leaves, device, make)
    return writer.module(program.instructions, results)


def region_module(
    instructions: Sequence[Instruction],
    inputs: Sequence[str],
    outputs: Sequence[str],
    device: torch.device,
    make: Callable[[Special], nn.Module],
    *,
    numbered: bool = False,
) -> fx.GraphModule:
    """A module called with the inputs of a region, and then the random state; see `to_module`.

    If it is `numbered`, the numbers of its random operators follow, int64 [operators that draw].
    """
    return _Writer(inputs, device, make, numbered).module(instructions, outputs)


class _Recomputed(nn.Module):
    """A segment that keeps only its inputs and is recomputed in the backward pass."""

    def __init__(self, segment: fx.GraphModule) -> None:
        super().__init__()
        self.segment = segment

    def forward(self, *given: torch.Tensor) -> Any:
        """The results of the segment; its random numbers depend on the given random state."""
        return checkpoint(self.segment, *given, use_reentrant=False, preserve_rng_state=False)


class _Writer:
    """A graph while it is written."""

    def __init__(
        self,
        inputs: Sequence[str],
        device: torch.device,
        make: Callable[[Special], nn.Module],
        numbered: bool = False,
    ) -> None:
        self.device = device
        self.make = make
        self.root, self.graph = nn.Module(), fx.Graph()
        self.nodes = {name: self.graph.placeholder(f"leaf_{i}") for i, name in enumerate(inputs)}
        self.nodes[_RANDOM_STATE] = self.graph.placeholder("random_state")
        if numbered:
            self.nodes[_NUMBERS] = self.graph.placeholder("numbers")
        self.drawn = 0  # random operators so far

    def module(self, instructions: Sequence[Instruction], results: Sequence[str]) -> fx.GraphModule:
        norms = fused_norms(instructions, results)
        replaced = {number for norm in norms.values() for number in norm.replaced}
        for number, instruction in enumerate(instructions):
            if number in norms:
                self.norm(norms[number], number)
            elif number not in replaced:
                self.write(instruction, number)
        self.graph.output(tuple(self.nodes[name] for name in results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, class_name="Program")

    def write(self, instruction: Instruction, number: int) -> None:
        given = [self.nodes[name] for name in reads(instruction)]
        if isinstance(instruction, Compute):
            node = self.compute(instruction, number)
            self.note(node, instruction, number)
            self.name(node, instruction)
            return
        if isinstance(instruction, Load):
            view = self.graph.call_method("view", (*given, instruction.shape))
            self.nodes[instruction.result] = view
            return
        if isinstance(instruction, RecomputedSegment):
            inner = _Writer(instruction.takes, self.device, self.make)
            module: nn.Module = _Recomputed(
                inner.module(instruction.instructions, instruction.gives)
            )
        else:
            module = self.make(instruction)
        if isinstance(instruction, Draws | RecomputedSegment):
            given.append(self.random_state())
        name = f"{type(instruction).__name__.lower()}_{number}"
        self.root.add_module(name, module)
        node = self.graph.call_module(name, tuple(given))
        if isinstance(instruction, Draws):
            self.note(node, instruction, number)
        self.name(node, instruction)

    def norm(self, norm: FusedNorm, number: int) -> None:
        """Write a batch norm as one operator of torch."""
        args = tuple(to_torch(a, self.nodes, self.device) for a in arguments(norm))
        node = self.graph.call_function(batch_norm, args)
        self.note(node, norm.normalizes, number)
        self.split(node, results_of(norm))

    def random_state(self) -> fx.Node:
        """The random state for the next operator, with its number if numbers are given."""
        state = self.nodes[_RANDOM_STATE]
        if _NUMBERS not in self.nodes:
            return state
        self.drawn += 1
        number = self.graph.call_method("narrow", (self.nodes[_NUMBERS], 0, self.drawn - 1, 1))
        return self.graph.call_function(torch.cat, ([state, number],))

    def note(self, node: fx.Node, instruction: Compute | Draws, number: int) -> None:
        """Store a node's operator and position for interpreters of the graph."""
        node.meta["op"], node.meta["place"] = instruction.op, number

    def compute(self, instruction: Compute, number: int) -> fx.Node:
        op = instruction.op
        args = tuple(to_torch(a, self.nodes, self.device) for a in op.args)
        kwargs = {key: to_torch(value, self.nodes, self.device) for key, value in op.kwargs}
        scaled = bool(instruction.scaling)
        if instruction.routing is None and not scaled and op.target not in _OWN_MODULES:
            return self.graph.call_function(operator_of(op.target), args, kwargs)
        name = f"{op.kind}_{number}"
        self.root.add_module(name, self.make(instruction))
        return self.graph.call_module(name, args, kwargs)

    def name(self, node: fx.Node, instruction: Instruction) -> None:
        """Note which node has which of the values that an instruction defines."""
        names = writes(instruction)
        together = isinstance(instruction, RunModule | RecomputedSegment)
        if isinstance(instruction, Compute):
            together = names != (instruction.op.name,)
        if not together:
            self.nodes[names[0]] = node
            return
        self.split(node, names)

    def split(self, node: fx.Node, names: Sequence[str]) -> None:
        """Name the results of a node that returns several."""
        for i, name in enumerate(names):
            self.nodes[name] = self.graph.call_function(operator.getitem, (node, i))
