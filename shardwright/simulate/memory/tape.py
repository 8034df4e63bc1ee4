"""The state of the memory simulation: values in blocks of memory, and the autograd nodes to run.

Simulations of single instructions read and change it; `memory_simulator.py` runs whole programs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardwright.ir.graph import ITEM_BYTES, Graph, Op
from shardwright.ir.op_memory import OpTracer, contiguous_strides
from shardwright.program.instructions import (
    CALLS,
    Compute,
    Instruction,
    Move,
    Program,
    Redistribute,
    Shape,
    reads,
    writes,
)
from shardwright.program.step.instructions import Gradients
from shardwright.simulate.costs.fusion import Fusion
from shardwright.simulate.memory.allocator import Allocator, Block, Use
from shardwright.simulate.memory.redistribution import moved
from shardwright.simulate.memory.values import RankModel, View


@dataclass(frozen=True)
class Fp8Memory:
    """Layers in 8 bits by name, whether each keeps a copy of its input, and that copy's form.

    `item_bytes` are those of an element in 8 bits with its scales; `saves` says whether layers keep
    inputs in 8 bits, or as they are, and `turns_weights` whether a second layout of weights that
    are gathered in 8 bits is kept beside them.
    """

    layers: Mapping[str, bool] = field(default_factory=dict)
    item_bytes: float = 1.0
    saves: bool = False
    turns_weights: bool = False

    def copy(self, view: View) -> int:
        """Bytes of a tensor in 8 bits."""
        return math.ceil(prod(view.shape) * self.item_bytes)


NO_FP8 = Fp8Memory()


@dataclass
class GradientNode:
    """A node of the autograd graph, which reads gradients of `results` and makes others.

    New blocks are attributed to `module`. It leads to inputs of the region, to weights, or to both.
    """

    label: str
    module: str | None
    results: tuple[str, ...]
    run: Callable[[], None]
    to_inputs: bool
    to_weights: bool


class Tape(ABC):
    """One run of a region, in blocks of memory on `allocator`; `given` are its inputs."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        given: Mapping[str, View],
        allocator: Allocator,
        footprints: OpTracer,
        rank: RankModel,
    ) -> None:
        self.graph, self.program, self.allocator, self.book = graph, program, allocator, footprints
        self.sizes = dict(program.mesh.axes)
        self.rank, self.skew = rank, rank.expert_skew
        self.views: dict[str, View] = dict(given)
        self.ends: set[str] = set()  # inputs whose gradients are added to totals
        self.gradients: dict[str, View] = {}  # of values, not yet read by the nodes that made them
        self.kept: dict[str, View] = {}  # those totals
        self.nodes: list[GradientNode] = []
        self.serial = graph.op
        self.saving = True
        self.fusions: Mapping[str, Fusion] = {}  # of operators in kernels of the compiler
        self.unwritten: frozenset[str] = frozenset()  # values inside of such kernels
        self.fp8 = NO_FP8
        self.given_again: frozenset[int] = frozenset()  # ids of blocks that nothing saves
        # Of a backward pass in two parts: the one that runs, values that gradients lead from to
        # inputs, or to weights alone, and blocks that are saved until the second part has run.
        self.part = Gradients.ALL
        self.from_inputs: set[str] = set()
        self.from_weights: set[str] = set()
        self._until_weights: list[Block] = []
        self._arrived: list[Block] = []  # gradients that are there until then, too
        self._reading: tuple[str, ...] = ()

    @abstractmethod
    def run(self, instruction: Instruction) -> None:
        """Simulate one instruction forward."""

    def through(self, instructions: Sequence[Instruction], returned: Sequence[str]) -> None:
        """Run `instructions` forward; each value is dropped after its last reader."""
        last = {name: i for i, one in enumerate(instructions) for name in reads(one)}
        last.update((name, len(instructions)) for name in returned)
        mine: set[str] = set()
        for i, instruction in enumerate(instructions):
            self._reading = reads(instruction)
            self.run(instruction)
            made = writes(instruction)
            if not self.from_inputs.isdisjoint(self._reading):
                self.from_inputs.update(made)
            elif not self.from_weights.isdisjoint(self._reading):
                self.from_weights.update(made)
            mine.update(made)
            for name in dict.fromkeys((*reads(instruction), *made)):
                if name in mine and last.get(name, i) == i and name in self.views:
                    self.allocator.drop(self.views.pop(name).block)

    def splits(self, weights: Collection[str]) -> None:
        """Split the backward pass into two parts: gradients of inputs, then of these weights."""
        self.from_weights = set(weights)
        self.from_inputs = {
            name for name, view in self.views.items() if view.grad and name not in weights
        }

    def back(self, part: Gradients = Gradients.ALL) -> None:
        """Run nodes from the last to the first: all, or those that lead to inputs or weights.

        Until the second part has run all that is saved is kept, and gradients that have arrived at
        nodes that lead to both (`runtime/regions/split_calls.py`).
        """
        self.part = part
        for node in reversed(self.nodes):
            if part is Gradients.INPUTS and not node.to_inputs:
                continue
            if part is Gradients.WEIGHTS and node.to_inputs and not node.to_weights:
                continue
            self.allocator.where = f"{node.label}, backward"
            self.allocator.module = node.module
            node.run()
        if part is not Gradients.INPUTS:
            self.nodes = []
            for block in self._until_weights:
                self.allocator.unsave(block)
            for block in self._arrived:
                self.allocator.drop(block)
            self._until_weights, self._arrived = [], []

    def hold(self, gradients: Sequence[View | None]) -> None:
        """Keep gradients until the second part of the backward pass has run."""
        self._arrived += [self.allocator.own(one.block) for one in gradients if one is not None]

    def unsave(self, block: Block) -> None:
        """Release a block that a node saved, after the node has run."""
        if self.part is Gradients.ALL:
            self.allocator.unsave(block)
        else:
            self._until_weights.append(block)

    def label(self, op: Op) -> str:
        where = op.source.module
        return f"{where}: {op.kind}" if where else op.kind

    def module(self, one: Instruction) -> str | None:
        """The module that an instruction belongs to; None if to none or to several."""
        match one:
            case Compute() if one.op.name not in self.serial:  # a cast of a parameter
                return self.views[one.op.operands[0]].block.module
            case Redistribute():
                return self.views[one.value].block.module
        assert isinstance(one, CALLS), "regions have operators and local redistributions"
        return one.op.source.module

    def give(self, name: str, gradient: View) -> None:
        """Add a gradient to that of the value `name`, which takes over its ownership."""
        old = self.gradients.get(name)
        if old is None:
            self.gradients[name] = gradient
        elif old.block.owners == 1 and old.dense and old.block.use is not Use.LASTING:
            self.allocator.drop(gradient.block)
        else:
            size = 0 if name in self.unwritten else old.bytes
            new = self.allocator.new(size, module_of=old.block)
            self.allocator.drop(old.block)
            self.allocator.drop(gradient.block)
            strides = contiguous_strides(old.shape)
            self.gradients[name] = View(new, old.shape, strides, old.dtype)
        if name in self.ends:
            self.keep(name)

    def keep(self, name: str) -> None:
        """Store the gradient of a leaf, or add it to the stored one."""
        gradient = self.gradients.pop(name)
        old = self.kept.get(name)
        if old is not None:
            self.allocator.drop(gradient.block)
            return
        if not gradient.contiguous:
            new = self.allocator.new(gradient.bytes)
            self.allocator.drop(gradient.block)
            gradient = View(new, gradient.shape, contiguous_strides(gradient.shape), gradient.dtype)
        self.allocator.becomes(gradient.block, Use.GRADIENT)
        self.allocator.assign(gradient.block, self.views[name].block.module, gradient.bytes)
        self.kept[name] = gradient

    def taken(self, name: str) -> View | None:
        """Remove and return the gradient of a value; None if it has none."""
        return self.gradients.pop(name, None)

    def node(self, label: str, results: tuple[str, ...], run: Callable[[], None]) -> None:
        if self.saving:
            inputs, weights = (
                not known.isdisjoint(self._reading)
                for known in (self.from_inputs, self.from_weights)
            )
            self.nodes.append(
                GradientNode(label, self.allocator.module, results, run, inputs, weights)
            )

    def redistribute(self, one: Redistribute) -> None:
        """Redistribute a value; the backward pass redistributes its gradient."""
        source = self.views[one.value]
        found = self.redistributed(one, source)
        found.grad = one.differentiable and source.grad
        self.views[one.result] = found
        if not found.grad:
            return

        def back() -> None:
            gradient = self.taken(one.result)
            if gradient is None:
                return
            cast = self.cast(gradient, one.cast[1] if one.cast else "")
            sent = self.moved(cast, one.backward, one.atoms_grad, one.before)
            self.allocator.drop(cast.block)
            self.allocator.drop(gradient.block)
            self.give(one.value, sent)

        self.node(f"gradient of {one.value}", (one.result,), back)

    def redistributed(self, one: Redistribute, source: View) -> View:
        """The value in its new layout, with an owner."""
        cast = self.cast(source, one.cast[0] if one.cast else "")
        found = self.moved(cast, one.forward, one.atoms_before, one.after)
        self.allocator.drop(cast.block)
        return found

    def cast(self, view: View, dtype: str) -> View:
        """`view` in another dtype, or as it is, with an owner."""
        if dtype in ("", view.dtype):
            self.allocator.own(view.block)
            return view
        block = self.allocator.new(prod(view.shape) * ITEM_BYTES[dtype], module_of=view.block)
        return View(block, view.shape, contiguous_strides(view.shape), dtype, view.grad)

    def moved(self, view: View, moves: tuple[Move, ...], atoms: Shape, shape: Shape) -> View:
        """`view` in another layout, with an owner."""
        return moved(self.allocator, view, moves, atoms, shape, self.sizes, self.rank.backend)
