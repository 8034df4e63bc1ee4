"""Simulates the memory of a step program: runs its instructions on the simulated allocator.

It models `runtime/executor`, with the same buffers and the same ownership of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import final

from shardwright.ir.graph import ITEM_BYTES, Graph
from shardwright.ir.op_memory import OpTracer, contiguous_strides
from shardwright.ir.options.fp8 import FLOAT8
from shardwright.program.instructions import Compute, Instruction, Move, Program, Shape, writes
from shardwright.program.instructions import reads as used
from shardwright.program.step.channels import members
from shardwright.program.step.host_copies import Fetch, HostCopy
from shardwright.program.step.instructions import (
    TOTAL,
    Accumulate,
    Add,
    Backward,
    Forward,
    Free,
    Gradients,
    Part,
    Recv,
    Relayout,
    Seed,
    Send,
    StepInstruction,
    Transfer,
    Update,
    Wait,
    reads,
)
from shardwright.program.step.lower.regions import of_the_graph
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.micro_batches import AXIS as MICRO_BATCHES
from shardwright.simulate.costs.fusion import Fusion
from shardwright.simulate.memory.allocator import Allocator, Block, Use
from shardwright.simulate.memory.collectives import Results, SentTensors, started
from shardwright.simulate.memory.memory_simulator import MemorySimulator
from shardwright.simulate.memory.redistribution import moved_locally
from shardwright.simulate.memory.step.messages import receiving, sending
from shardwright.simulate.memory.tape import NO_FP8, Fp8Memory
from shardwright.simulate.memory.values import RankModel, View

Observer = Callable[[dict[str, View]], None]  # is given the values that are there, by name


@dataclass(frozen=True)
class Host:
    """Inputs of the memory simulation besides the program.

    `update` takes and gives back the memory of an `Update`; a step without one is not updated.
    `fusions` are those of compiled layers, by operator, `fp8` the layers in 8 bits.
    """

    graph: Graph
    allocator: Allocator
    book: OpTracer
    rank: RankModel
    update: Callable[[Sequence[str]], None]
    fusions: Mapping[str, Fusion] = field(default_factory=dict)
    fp8: Fp8Memory = NO_FP8

    @cached_property
    def unwritten(self) -> frozenset[str]:
        """Values that fused kernels do not write."""
        return frozenset(
            name
            for op, fusion in self.fusions.items()
            for name, inside in zip(self.graph.op[op].outputs, fusion.results, strict=True)
            if inside
        )


@dataclass
class _Call:
    """A run of a region before its backward pass, and the names of its values in the graph."""

    tape: MemorySimulator
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@final
class StepMemory:
    """Plays `program` from the values `given`, which it does not free."""

    def __init__(self, program: StepProgram, given: Mapping[str, View], host: Host) -> None:
        self.program, self.host, self.allocator = program, host, host.allocator
        self.host_memory = Allocator()  # of the host of the device
        self.on_host = {one.result for one in program.host_copies() if not isinstance(one, Fetch)}
        self.on_host |= {
            one.total
            for one in program.instructions
            if isinstance(one, Accumulate) and one.value in self.on_host
        }
        self.given = frozenset(given)
        self.values: dict[str, View] = dict(given)
        self.calls: dict[str, _Call] = {}
        self.in_flight: dict[str, Callable[[], list[View]]] = {}
        self.owned: set[str] = set()  # values that share their elements with nothing else
        read = Counter(name for one in program.instructions for name in reads(one))
        self.read_once = frozenset(name for name, times in read.items() if times == 1)
        # Of calls whose backward pass comes in two parts, the positions of the weights.
        self.weights = {
            one.call: [i for i in range(len(one.made)) if one.made[i] or i in dict(one.totals)]
            for one in program.instructions
            if isinstance(one, Backward) and one.part is Gradients.WEIGHTS
        }
        self.leaf_of = {value: leaf for leaf, value in program.gradients}
        self._named: dict[object, tuple[tuple[Instruction, ...], tuple[str, ...]]] = {}

    def play(self, observe: Observer | None = None) -> None:
        """Run everything.

        Before it and after each instruction `observe` is called with the values that are there.
        """
        observe = observe or _unobserved
        observe(self.values)
        for one in self.program.instructions:
            self.instruction(one)
            observe(self.values)
        self.forget_results()

    def instruction(self, one: StepInstruction) -> None:
        """Run one instruction."""
        match one:
            case Forward():
                self.forward(one)
            case Backward(part=Gradients.ALL):
                self.backward(one)
            case Backward():
                self.backward_part(one)
            case Send():
                self.in_flight[one.handle] = sending(self.allocator, one, self.values)
            case Recv():
                self.in_flight[one.handle] = receiving(self.allocator, one)
            case Transfer():
                self.in_flight[one.handle] = self.transfer(one)
            case HostCopy():
                if one.value in self.values:  # no gradient that nothing contributes to
                    self.in_flight[one.handle] = self.copied(one)
            case Wait() if one.handle in self.in_flight:
                for name, view in zip(one.results, self.in_flight.pop(one.handle)(), strict=True):
                    self.values[name] = self.counted(name, view)
                self.owned.update(one.results)
            case Relayout():
                self.values[one.result] = self.relaid(one)
            case Add():
                if any(name in self.values for name in one.terms):
                    self.values[one.result] = self.sum_of(one.terms)
            case Accumulate():
                self.accumulate(one)
            case Free():
                for name in one.names:
                    self.drop(name)
            case Seed():
                self.seed(one)
            case Update():
                self.forget_results()
                have = [leaf for leaf, value in one.parameters if value in self.values]
                self.host.update(have)

    def forget_results(self) -> None:
        """Drop outputs and new contents of buffers, which the caller owns now."""
        for name in (*self.program.outputs, *(value for _, value in self.program.updates)):
            self.drop(name)

    def drop(self, name: str) -> None:
        """Drop a value."""
        view = self.values.pop(name, None)
        if view is not None and name not in self.given:
            self.memory_of(name).drop(view.block)

    def memory_of(self, name: str) -> Allocator:
        """The memory that a value is in."""
        return self.host_memory if name in self.on_host else self.allocator

    def seed(self, one: Seed) -> None:
        """Allocate the gradients of outputs, which start the backward pass."""
        graph = self.host.graph
        for number, name in one.gradients:
            tensor = graph.tensor[graph.outputs[number]]
            block = self.allocator.new(int(tensor.bytes))
            strides = contiguous_strides(tensor.shape)
            self.values[name] = View(block, tensor.shape, strides, tensor.dtype)

    def forward(self, one: Forward) -> None:
        """Run a region."""
        region, graph = self.program.regions[one.region], self.host.graph
        instructions, outputs = self.instructions_of(one)
        given = {
            local: replace(self.values[name], grad=trained and one.saves)
            for local, name, trained in zip(region.inputs, one.inputs, region.trained, strict=True)
        }
        program = Program(self.program.mesh, 0, region.inputs, instructions, outputs, ())
        host = self.host
        tape = MemorySimulator(graph, program, given, self.allocator, host.book, host.rank)
        tape.sizes[MICRO_BATCHES] = 1  # along which ranks cut, and send nothing
        tape.saving, tape.fp8 = one.saves, host.fp8
        if host.fusions:
            tape.fusions, tape.unwritten = host.fusions, self.unwritten(instructions, outputs)
        tape.given_again = frozenset(
            id(given[local].block)
            for local, dropped in zip(region.inputs, region.dropped, strict=True)
            if dropped
        )
        if one.call in self.weights:
            tape.splits([region.inputs[i] for i in self.weights[one.call]])
        tape.through(instructions, outputs)
        for name, local in zip(one.outputs, outputs, strict=True):
            view = self.values[name] = tape.views[local]
            if not one.saves and view.block.use is Use.WORKSPACE:  # kept for what runs again
                self.allocator.becomes(view.block, Use.SAVED)
        if one.saves:
            self.calls[one.call] = _Call(tape, region.inputs, outputs)

    def unwritten(
        self, instructions: Sequence[Instruction], outputs: Sequence[str]
    ) -> frozenset[str]:
        """The values that only fused kernels of a run read, and no other instruction."""
        read = {name for one in instructions if not isinstance(one, Compute) for name in used(one)}
        made = {name for one in instructions for name in writes(one)}
        return (self.host.unwritten & made) - read - set(outputs)

    def instructions_of(self, one: Forward) -> tuple[tuple[Instruction, ...], tuple[str, ...]]:
        """The instructions of a run and its outputs, named as in the graph.

        Those of other micro-batches are the same.
        """
        key = one.region, one.variant, one.ops
        if key not in self._named:
            region = self.program.regions[one.region]
            variant = region.variants[one.variant]
            instructions, names = of_the_graph(variant, one.ops, self.host.graph)
            self._named[key] = tuple(instructions), tuple(names[name] for name in region.outputs)
        return self._named[key]

    def backward(self, one: Backward) -> None:
        """Run a region's backward pass."""
        call = self.calls.pop(one.call)
        tape = call.tape
        self.give(call, one)
        totals = {call.inputs[i]: total for i, total in one.totals}
        tape.ends = set(totals)
        tape.kept = {
            local: self.values[total] for local, total in totals.items() if total in self.values
        }
        tape.back()
        for local, total in totals.items():
            if local in tape.kept:
                new = total not in self.values
                self.values[total] = self.own(total, tape.kept[local]) if new else tape.kept[local]
        for local, name in zip(call.inputs, one.made, strict=True):
            if name and local in tape.gradients:
                gradient = self.values[name] = tape.gradients.pop(local)
                if gradient.block.owners == 1 and gradient.contiguous:
                    self.owned.add(name)
        for view in tape.gradients.values():
            self.allocator.drop(view.block)

    def give(self, call: _Call, one: Backward) -> None:
        """Pass the gradients of a call's outputs to its tape."""
        for output, names in zip(call.outputs, one.given, strict=True):
            if any(name in self.values for name in names):
                gradient = self.sum_of(names)
                if call.tape.views[output].grad:
                    call.tape.give(output, gradient)
                else:
                    self.allocator.drop(gradient.block)

    def backward_part(self, one: Backward) -> None:
        """Run one part of a region's backward pass: to its inputs first, then to its weights."""
        call = self.calls[one.call]
        tape = call.tape
        if one.part is Gradients.INPUTS:
            self.give(call, one)
            tape.hold([tape.gradients.get(name) for name in call.outputs])
        else:
            del self.calls[one.call]
        tape.back(one.part)
        for local, name in zip(call.inputs, one.made, strict=True):
            if name and local in tape.gradients:
                self.values[name] = tape.gradients.pop(local)
        found = [(total, call.inputs[i]) for i, total in one.totals]
        for total, local in found:  # all gradients are there until the last is added
            if local in tape.gradients:
                self.owned.add(total)
                if total not in self.values:
                    view, like = tape.gradients[local], self.module_of(total)
                    block = self.allocator.new(view.bytes, Use.GRADIENT, module_of=like)
                    strides = contiguous_strides(view.shape)
                    self.values[total] = View(block, view.shape, strides, view.dtype)
        for _, local in found:
            if local in tape.gradients:
                self.allocator.drop(tape.gradients.pop(local).block)
        if one.part is Gradients.WEIGHTS:
            for view in tape.gradients.values():
                self.allocator.drop(view.block)

    def own(self, total: str, view: View) -> View:
        """A first gradient in unshared memory, because others are added to it in place."""
        if view.block.owners == 1:
            return view
        new = self.allocator.new(view.bytes, Use.GRADIENT, module_of=self.module_of(total))
        self.allocator.drop(view.block)
        return View(new, view.shape, contiguous_strides(view.shape), view.dtype)

    def module_of(self, value: str) -> Block | None:
        """A block of the module to which a gradient is attributed; None if unknown."""
        leaf = self.leaf_of.get(value, value.removeprefix(TOTAL))
        return self.values[leaf].block if leaf in self.values else None

    def gives(self, name: str) -> bool:
        """Whether the reader of a value may overwrite it."""
        return name in self.owned and name in self.read_once

    def counted(self, name: str, view: View) -> View:
        """Count a value as a gradient if it is one of a parameter; return it."""
        if name in self.on_host:
            return view
        if name in self.leaf_of or name.startswith(TOTAL):
            self.allocator.becomes(view.block, Use.GRADIENT)
            like = self.module_of(name)
            if like is not None:
                self.allocator.assign(view.block, like.module, view.bytes)
        return view

    def accumulate(self, one: Accumulate) -> None:
        """Make the first value the total, in place if it has no other owner; add others to it."""
        if one.value not in self.values or one.total in self.values:
            return
        view, memory = self.values[one.value], self.memory_of(one.value)
        if self.gives(one.value):
            block = memory.own(view.block)
        else:
            block = memory.new(view.bytes, module_of=view.block)
        strides = contiguous_strides(view.shape)
        total = View(block, view.shape, strides, view.dtype)
        self.values[one.total] = self.counted(one.total, total)

    def sum_of(self, names: Sequence[str]) -> View:
        """The sum of gradients, with an owner."""
        first, *others = (self.values[name] for name in names if name in self.values)
        if not others:
            return replace(first, block=self.allocator.own(first.block))
        strides = contiguous_strides(first.shape)
        return View(
            self.allocator.new(first.bytes, module_of=first.block),
            first.shape,
            strides,
            first.dtype,
        )

    def relaid(self, one: Relayout) -> View:
        """A contiguous value after moves without communication."""
        view = self.sent(one.value, one.atoms, one.local, one.dtype)
        if not view.contiguous:
            block = self.allocator.new(view.bytes, module_of=view.block)
            self.allocator.drop(view.block)
            view = replace(view, block=block)
        return View(view.block, one.shape, contiguous_strides(one.shape), one.dtype, view.grad)

    def sent(self, name: str, atoms: Shape, local: tuple[Move, ...], dtype: str) -> View:
        """A value in the dtype and shape in which a transfer reads it, with an owner."""
        size = prod(atoms) * ITEM_BYTES[dtype]
        view = self.values.get(name)
        strides = contiguous_strides(atoms)
        if view is None:
            return View(self.allocator.new(size), atoms, strides, dtype)
        if view.dtype != dtype or not view.contiguous:
            block = self.allocator.new(size, module_of=view.block)
        else:
            block = self.allocator.own(view.block)
        return moved_locally(self.allocator, View(block, atoms, strides, dtype, view.grad), local)

    def transfer(self, one: Transfer) -> Results:
        """Start a transfer; what is returned gives the results, each with an owner."""
        views = [self.sent(part.value, part.atoms, part.local, part.dtype) for part in one.parts]
        ranks = len(members(one.channel, self.program.mesh))
        own = self.taken(one.parts[0], views[0])
        terms = self.host.rank.backend.receives_terms
        sent = SentTensors(one.parts, views, ranks, own, terms)
        arrives = started(self.allocator, one.collective, sent)
        turned = self.host.fp8.turns_weights and one.parts[0].dtype == FLOAT8
        return (lambda: [self.turned(view) for view in arrives()]) if turned else arrives

    def turned(self, view: View) -> View:
        """A weight in 8 bits with its copy in the other layout, as one block."""
        both = self.allocator.new(2 * view.bytes, module_of=view.block)
        self.allocator.drop(view.block)
        return replace(view, block=both)

    def copied(self, one: HostCopy) -> Results:
        """Start a copy to the host, or from it to new memory; both values are there meanwhile."""
        source = self.values[one.value]
        before, after = self.allocator, self.host_memory
        if isinstance(one, Fetch):
            before, after = after, before
        before.own(source.block)
        block = after.new(one.bytes, module_of=source.block)
        made = View(block, one.shape, contiguous_strides(one.shape), one.dtype, source.grad)

        def results() -> list[View]:
            before.drop(source.block)
            return [made]

        return results

    def taken(self, part: Part, sent: View) -> bool:
        """Whether the tensor that is sent may be overwritten: a copy, or an owned value."""
        value = self.values.get(part.value)
        return value is None or value.block is not sent.block or self.gives(part.value)


def _unobserved(_: dict[str, View]) -> None:
    """An observer of `StepMemory.play` that does nothing."""
