"""Simulates the memory of a program's passes: every tensor's lifetime in eager torch's order.

Forward, a value lives until its last reader has run or, where autograd saves
it, until that operator's backward pass. The backward pass goes through the
operators in reverse, which is autograd's order: a node runs when all that read
its results have. What single operators do is `Footprints`' matter, what
redistributions need `moving`'s, and what kernels take inside `kernels`'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

from shardwright.ir.graph import ITEM_BYTES, Graph, LeafKind, Op
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    Fetch,
    Gather,
    Instruction,
    Joint,
    Load,
    Move,
    Prefetch,
    Program,
    Recompute,
    Redistribute,
    Reduce,
    RunModule,
    Shape,
    SharedAttention,
    Uniform,
    reads,
    writes,
)
from shardwright.simulate.memory.allocator import Allocator, Block, Use
from shardwright.simulate.memory.collectives import moved
from shardwright.simulate.memory.dropped_copies import Dropped
from shardwright.simulate.memory.footprints import Footprints
from shardwright.simulate.memory.gathers import PrefetchBucket, gather, prefetch
from shardwright.simulate.memory.instructions import (
    attention,
    draw,
    is_fused,
    local_shapes,
    recompute,
    stated,
)
from shardwright.simulate.memory.mixture import held_experts
from shardwright.simulate.memory.op_memory_trace import Seen
from shardwright.simulate.memory.parameters import fetch, load, reduce
from shardwright.simulate.memory.values import View, contiguous_strides
from shardwright.simulate.memory.workspaces import inside


@dataclass
class Node:
    """A node of the autograd graph: it turns gradients of `results` into others.

    What it makes belongs to `module`.
    """

    label: str
    module: str | None
    results: tuple[str, ...]
    run: Callable[[], None]


@final
class MemorySimulator:
    """One rank's step, in blocks of memory on `heap`.

    `given` are the leaves as the program is called with them; `stored` those
    among them that are parameters in plain tensors, whose gradients are taken
    as they come. `skew` as in `Machine.expert_skew`.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        given: Mapping[str, View],
        heap: Allocator,
        footprints: Footprints,
        on_cpu: bool,
        plain: bool,
        skew: float = 1.0,
    ) -> None:
        self.graph, self.program, self.heap, self.book = graph, program, heap, footprints
        self.sizes = dict(program.mesh.axes)
        self.on_cpu, self.plain, self.skew = on_cpu, plain, skew
        self.views: dict[str, View] = dict(given)
        ends = graph.leaves_of(LeafKind.PARAMETER, LeafKind.INPUT)
        self.ends = {leaf.name for leaf in ends}  # where gradients go
        self.gradients: dict[str, View] = {}  # on their way back
        self.kept: dict[str, View] = {}  # gradients of parameters and inputs
        self.nodes: list[Node] = []
        self.serial = {op.name: op for op in graph.ops}
        self.unread: dict[str, Node] = {}  # those that come just before a value's first reader
        self.saving = True
        # Copies that may be made again: one by one, or together with others.
        self.source: dict[str, tuple[Redistribute, View]] = {}
        self.flown: dict[str, tuple[PrefetchBucket, int]] = {}
        self.flights: dict[str, PrefetchBucket] = {}
        self.works: defaultdict[str, list[Block]] = defaultdict(
            list
        )  # what sums of gradients on their way keep

    def forward(self) -> None:
        """Run the program; what it returns stays."""
        returned = (*self.program.outputs, *(value for _, value in self.program.updates))
        self.through(self.program.instructions, returned)

    def through(self, instructions: Sequence[Instruction], returned: Sequence[str]) -> None:
        """Run `instructions`, forgetting each value after its last reader."""
        last = {name: i for i, one in enumerate(instructions) for name in reads(one)}
        last.update((name, len(instructions)) for name in returned)
        mine: set[str] = set()
        for i, instruction in enumerate(instructions):
            self.run(instruction)
            made = writes(instruction)
            mine.update(made)
            for name in dict.fromkeys((*reads(instruction), *made)):
                if name in mine and last.get(name, i) == i and name in self.views:
                    self.heap.drop(self.views.pop(name).block)

    def backward(self) -> None:
        """The backward pass, from the first output."""
        loss = self.program.outputs[0]
        view = self.views[loss]
        if view.grad:
            block = self.heap.new(view.bytes, like=view.block)
            self.give(loss, View(block, view.shape, view.strides, view.dtype))
        self.back()

    def end(self) -> None:
        """Forget what the program returned."""
        returned = (*self.program.outputs, *(value for _, value in self.program.updates))
        for name in dict.fromkeys(returned):
            if name in self.views and name not in self.program.leaves:
                self.heap.drop(self.views.pop(name).block)

    def back(self) -> None:
        """Run all nodes from the last to the first."""
        while self.nodes:
            node = self.nodes.pop()
            self.heap.where = f"{node.label}, backward"
            self.heap.module = node.module
            node.run()

    def run(self, instruction: Instruction) -> None:
        """One instruction forward."""
        heap = self.heap
        heap.module = self.module(instruction)
        self.nodes += [self.unread.pop(n) for n in reads(instruction) if n in self.unread]
        match instruction:
            case Compute():  # first, as most are
                heap.where = f"{self.label(instruction.op)}, forward"
                if is_fused(self, instruction.op):
                    attention(self, instruction.op)
                elif instruction.routing is not None:
                    held_experts(self, instruction)
                else:
                    self.compute(instruction)
            case Load():
                load(self, instruction)
            case Fetch():
                fetch(self, instruction)
            case Reduce():
                reduce(self, instruction)
            case Prefetch():
                prefetch(self, instruction)
            case Gather():
                gather(self, instruction)
            case Redistribute():
                heap.where = f"redistribution of {instruction.value}, forward"
                self.redistribute(instruction)
            case Recompute():
                recompute(self, instruction)
            case Dropout() | Uniform():
                heap.where = f"{self.label(instruction.op)}, forward"
                draw(self, instruction)
            case Joint() | RunModule() | Attention() | SharedAttention():
                heap.where = f"{self.label(instruction.op)}, forward"
                stated(self, instruction.op, local_shapes(self, instruction), instruction)

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
            case Load() | Fetch() | Reduce() | Prefetch() | Gather() | Recompute():
                return None
        return one.op.source.module

    # Gradients on their way

    def give(self, name: str, gradient: View) -> None:
        """Hand over a gradient of the value `name`; its owner is passed on."""
        old = self.gradients.get(name)
        if old is None:
            self.gradients[name] = gradient
        elif old.block.owners == 1 and old.dense and old.block.use is not Use.HELD:
            self.heap.drop(gradient.block)
        else:
            new = self.heap.new(old.bytes, like=old.block)
            self.heap.drop(old.block)
            self.heap.drop(gradient.block)
            strides = contiguous_strides(old.shape)
            self.gradients[name] = View(new, old.shape, strides, old.dtype)
        if name in self.ends:
            self.keep(name)

    def keep(self, name: str) -> None:
        """The gradient of a leaf has come home: it is taken over, or added to the last."""
        gradient = self.gradients.pop(name)
        old = self.kept.get(name)
        if old is not None:
            self.heap.drop(gradient.block)
            return
        if not gradient.contiguous:
            new = self.heap.new(gradient.bytes)
            self.heap.drop(gradient.block)
            gradient = View(new, gradient.shape, contiguous_strides(gradient.shape), gradient.dtype)
        self.heap.becomes(gradient.block, Use.GRADIENT)
        self.heap.assign(gradient.block, self.views[name].block.module, gradient.bytes)
        self.kept[name] = gradient

    def taken(self, name: str) -> View | None:
        """The gradient of a value, for the node that made it."""
        return self.gradients.pop(name, None)

    # Instructions

    def node(self, label: str, results: tuple[str, ...], run: Callable[[], None]) -> None:
        if self.saving:
            self.nodes.append(Node(label, self.heap.module, results, run))

    def once_read(self, name: str, run: Callable[[], None]) -> None:
        """What happens to the gradient of the value `name` when its first reader has given its."""
        if self.saving:
            module = self.views[name].block.module
            self.unread[name] = Node("parameters", module, (name,), run)

    def redistribute(self, one: Redistribute) -> None:
        """A value in another layout; its gradient takes its own way back."""
        source = self.views[one.value]
        found = self.brought(one, source)
        found.grad = one.differentiable and source.grad
        self.views[one.result] = found
        self.source[one.result] = one, source
        if not found.grad:
            return

        def back() -> None:
            gradient = self.taken(one.result)
            if gradient is None:
                return
            cast = self.cast(gradient, one.cast[1] if one.cast else "")
            sent = self.moved(cast, one.backward, one.atoms_grad, one.before)
            self.heap.drop(cast.block)
            self.heap.drop(gradient.block)
            self.give(one.value, sent)

        self.node(f"gradient of {one.value}", (one.result,), back)

    def brought(self, one: Redistribute, source: View) -> View:
        """The value in its new layout, with an owner."""
        cast = self.cast(source, one.cast[0] if one.cast else "")
        found = self.moved(cast, one.forward, one.atoms_before, one.after)
        self.heap.drop(cast.block)
        return found

    def cast(self, view: View, dtype: str) -> View:
        """`view` in another dtype, or as it is, with an owner."""
        if dtype in ("", view.dtype):
            self.heap.own(view.block)
            return view
        block = self.heap.new(prod(view.shape) * ITEM_BYTES[dtype], like=view.block)
        return View(block, view.shape, contiguous_strides(view.shape), dtype, view.grad)

    def moved(self, view: View, moves: tuple[Move, ...], atoms: Shape, shape: Shape) -> View:
        """`view` in another layout, with an owner."""
        return moved(self.heap, view, moves, atoms, shape, self.sizes, self.on_cpu)

    def compute(self, one: Compute) -> None:
        """An operator as torch runs it."""
        op = one.op
        names = tuple(dict.fromkeys(op.operands))
        views = [self.views[name] for name in names]
        given = tuple(Seen(v.shape, v.strides, v.dtype, v.grad and self.saving) for v in views)
        call = self.book.call(op, names, given)
        seen = call.forward
        if seen is None:
            stated(self, op, one.shapes, one)
            return
        blocks = [view.block for view in views]
        kernel = inside(op, given, seen, on_cpu=self.on_cpu)
        self.heap.briefly(seen.peak + kernel.forward)
        for size in seen.made:
            blocks.append(self.heap.new(size))
        for name, result in zip(op.outputs, seen.results, strict=True):
            if result is not None:
                number, shape, strides, dtype = result
                known = self.graph.tensor.get(name)  # casts of parameters are not in the graph
                grad = any(v.grad for v in views) and (known is None or known.requires_grad)
                self.heap.own(blocks[number])
                self.views[name] = View(blocks[number], shape, strides, dtype, grad)
        saved: dict[int, Block] = {}
        dropped = Dropped(self, one.regathers)
        if self.saving:
            for number in seen.saved:
                if not dropped.takes(blocks[number]):
                    saved[number] = self.heap.save(blocks[number])
        for block in blocks[len(names) :]:
            self.heap.drop(block)
        if not any(self.views[n].grad for n in op.outputs if n in self.views):
            for block in saved.values():
                self.heap.unsave(block)
            return
        dropped.wanted()
        base = len(blocks)

        def back() -> None:
            came = [self.taken(name) for name in op.outputs]
            if all(gradient is None for gradient in came):
                for block in saved.values():
                    self.heap.unsave(block)
                return
            made = dropped.again()
            strides = tuple(None if g is None else g.strides for g in came)
            behind = call.backward(strides)
            known = [g.block for g in came if g is not None]
            alive: dict[int, Block] = {}
            left = dict(saved)
            self.heap.briefly(kernel.backward)
            births = iter(known)
            for number, size in behind.events:
                if size >= 0:
                    given_back = next(births, None)
                    alive[number] = self.heap.new(size) if given_back is None else given_back
                elif number in alive:
                    self.heap.drop(alive.pop(number))
                elif number in left and number not in alive:
                    self.heap.unsave(left.pop(number))
            for block in left.values():
                self.heap.unsave(block)
            home = []
            for name, gradient, view in zip(names, behind.gradients, given, strict=True):
                if gradient is not None:
                    number, how_strides = gradient
                    block = alive[number] if number >= base else blocks[number]
                    self.heap.own(block)
                    home.append((name, View(block, view.shape, how_strides, view.dtype)))
            for block in (*alive.values(), *(view.block for view in made)):
                self.heap.drop(block)
            for name, gradient_view in home:
                self.give(name, gradient_view)

        self.node(self.label(op), op.outputs, back)
