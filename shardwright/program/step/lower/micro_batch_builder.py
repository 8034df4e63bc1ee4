"""Builds the instructions of the forward and the backward pass of one micro-batch.

This is reverse-mode differentiation on instructions: the backward pass of a region is one
instruction, that of a redistribution redistributes the gradient, and a recomputed segment runs
again before its backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwright.ir.graph import LeafKind
from shardwright.program.instructions import Program, Redistribute, reads, writes
from shardwright.program.lower.segments.boundaries import Boundary
from shardwright.program.step.host_copies import Fetch, Offload
from shardwright.program.step.instructions import Add, Backward, Forward, Gradients
from shardwright.program.step.lower.step_builder import StepBuilder
from shardwright.program.step.lower.stretches import (
    Item,
    RunRedistribution,
    Stretch,
    op_name,
)

Copies = Sequence[tuple[int, str]]  # as in `Backward`


class MicroBatchBuilder:
    """Appends the passes of one micro-batch to the instructions of a step."""

    def __init__(self, builder: StepBuilder, program: Program, number: int) -> None:
        self.builder, self.program, self.number = builder, program, number
        self.tag = f"@{number}" if len(builder.step.programs) > 1 else ""
        self.cut = cut = builder.cut(program)
        self.items, self.types, self.loads = cut.items, cut.types, cut.loads
        self.redistributed, self.used = cut.redistributed, cut.used
        self.grads: dict[str, list[str]] = {}  # contributions to a value's gradient
        self.contributions: Counter[str] = Counter()
        self.again: set[str] = set()  # values that the backward pass computes again
        self.rerun: set[int] = set()  # segments that ran again, once for both parts of backward
        self.known_as: dict[str, str] = {}  # inputs that are values of another stage here
        self.weights_left: dict[int, Copies] = {}  # stretches whose weights have no gradients yet
        stretches = (at for at, item in enumerate(self.items) if isinstance(item, Stretch))
        prefix = builder.step.prefix
        self.calls = {at: f"{prefix}r{number}{self.tag}" for number, at in enumerate(stretches)}
        for leaf in builder.graph.leaves_of(LeafKind.INPUT):
            builder.inputs.append((leaf.name, number, self.own(leaf.name)))

    def forward(self) -> None:
        """Append the forward pass."""
        for index, item in enumerate(self.items):
            if isinstance(item, Stretch):
                saves = not item.segment
                self.builder.instructions.append(self.run(index, item, saves=saves, again=False))
            elif item.instruction.result in self.builder.shared:
                if item.instruction.result not in self.builder.gathered:
                    self.builder.gathered.add(item.instruction.result)
                    self.redistribute(item)
            else:
                self.redistribute(item)
            self.offload(item)

    def backward(self, part: Gradients = Gradients.ALL) -> None:
        """Append the backward pass, or one part of it, from the gradients given by `give`."""
        for index, item in reversed(list(enumerate(self.items))):
            if item.segment and item.segment not in self.rerun:
                if not self.grads.keys().isdisjoint(self.cut.made[item.segment]):
                    self.recompute(item.segment)
                self.rerun.add(item.segment)
            if isinstance(item, Stretch):
                if part is Gradients.WEIGHTS:
                    self.run_backward_of_weights(index, item)
                else:
                    self.run_backward(index, item, part)
                for one in reversed(self.cut.completed.get(index, ())):
                    self.redistribute_gradient(one)
            else:
                self.redistribute_gradient(item.instruction)

    def recompute(self, segment: int) -> None:
        """Append the recomputation of a segment."""
        self.rerun.add(segment)
        for boundary in self.cut.offloaded.values():
            if boundary.segment == segment:
                self.fetch(boundary)
        self.again.update(self.cut.made[segment])
        for index in self.cut.indices[segment]:
            item = self.items[index]
            if isinstance(item, Stretch):
                self.builder.instructions.append(self.run(index, item, saves=True, again=True))
            else:
                self.redistribute(item)

    def offload(self, item: Item) -> None:
        """Append the copies to the host of what an item makes for recomputed segments."""
        made = (item.instruction.result,) if isinstance(item, RunRedistribution) else item.outputs
        for name in made:
            if (boundary := self.cut.offloaded.get(name)) is not None:
                value = self.value(name)
                self.builder.instructions += self.builder.copy(
                    value, f"host/{value}", boundary.shape, boundary.dtype, Offload
                )

    def fetch(self, boundary: Boundary) -> None:
        """Append the copy of a boundary back from the host."""
        value = self.value(boundary.name)
        self.again.add(boundary.name)
        self.builder.instructions += self.builder.copy(
            f"host/{value}", self.value(boundary.name), boundary.shape, boundary.dtype, Fetch
        )

    def run(self, index: int, item: Stretch, *, saves: bool, again: bool) -> Forward:
        """The forward pass of one stretch, which becomes a region at its first use."""
        if index not in self.used:
            self.used[index] = self.builder.table.add(
                item.instructions,
                item.inputs,
                item.outputs,
                map(self.is_trained, item.inputs),
                map(self.is_trained, item.outputs),
                (name in item.dropped for name in item.inputs),
            )
        region, variant = self.used[index]
        ops = tuple(op_name(one) for one in item.instructions)
        inputs = tuple(self.value(name) for name in item.inputs)
        outputs = tuple(self.value(name) for name in item.outputs)
        return Forward(region, variant, self.calls[index], inputs, outputs, saves, again, ops)

    def run_backward(self, index: int, item: Stretch, part: Gradients) -> None:
        """Append the backward pass of one stretch, if a result of it has a gradient."""
        given = tuple(tuple(self.grads.pop(name, ())) for name in item.outputs)
        if not any(given):
            return
        copies: list[tuple[int, str]] = []
        for position, name in enumerate(item.inputs):
            if name not in item.dropped:
                continue
            if (segment := self.cut.made_again.get(name)) is not None:
                if segment not in self.rerun:
                    self.recompute(segment)
            else:
                self.copy_again(name)
            copies.append((position, self.value(name)))
        if part is Gradients.INPUTS:
            self.weights_left[index] = copies
        self.add_backward(index, item, part, given, copies)

    def copy_again(self, name: str) -> None:
        """Append what makes a copy of a parameter again, or a view of one."""
        name = self.first_name(name)
        if name in self.again:
            return
        view = self.cut.views.get(name)
        if view is None:
            if name in self.redistributed:  # a parameter itself is there
                self.again.add(name)
                self.redistribute(self.redistributed[name])
            return
        maker, made = view.maker, writes(view.maker)
        for operand in reads(maker):
            if operand == view.copy or operand in self.cut.views:
                self.copy_again(operand)
        nothing = [False] * len(reads(maker))
        region, variant = self.builder.table.add(
            [maker], reads(maker), made, nothing, [False] * len(made), nothing
        )
        inputs = tuple(map(self.value, reads(maker)))
        self.again.update(made)
        outputs = tuple(map(self.value, made))
        call = f"{self.builder.step.prefix}view {name}{self.tag}"
        ops = (op_name(maker),)
        self.builder.instructions.append(
            Forward(region, variant, call, inputs, outputs, saves=False, again=True, ops=ops)
        )

    def run_backward_of_weights(self, index: int, item: Stretch) -> None:
        """Append the gradients of a stretch's weights, after those of its inputs."""
        if (copies := self.weights_left.pop(index, None)) is not None:
            self.add_backward(index, item, Gradients.WEIGHTS, (), copies)

    def add_backward(
        self,
        index: int,
        item: Stretch,
        part: Gradients,
        given: tuple[tuple[str, ...], ...],
        copies: Copies,
    ) -> None:
        """Append a backward pass and pass on the gradients that it computes."""
        made: list[str] = []
        for name in item.inputs:
            is_weight = name in self.cut.weights
            other = Gradients.INPUTS if is_weight else Gradients.WEIGHTS
            wanted = self.is_trained(name) and part is not other
            made.append(self.contribution(name) if wanted else "")
        region, _ = self.used[index]
        self.builder.instructions.append(
            Backward(region, self.calls[index], given, tuple(made), tuple(copies), part=part)
        )
        for name, gradient in zip(item.inputs, made, strict=True):
            if gradient:
                self.give(name, gradient)

    def redistribute(self, item: RunRedistribution) -> None:
        """Append a redistribution; without moves its result is another name of the value."""
        one = item.instruction
        if not one.forward:
            return
        dtype = one.cast[0] if one.cast else self.types[one.value].dtype
        self.builder.instructions += self.builder.move(
            self.value(one.value),
            self.value(one.result),
            one.forward,
            one.atoms_before,
            one.after,
            dtype,
        )

    def redistribute_gradient(self, one: Redistribute) -> None:
        """Append the redistribution of the gradient of a redistribution's result."""
        given = self.grads.pop(one.result, [])
        if not given or not one.differentiable:
            return
        if not one.backward and not one.cast:
            for gradient in given:
                self.give(one.value, gradient)
            return
        if len(given) > 1:
            total = self.contribution(f"{one.result}/sum")
            self.builder.instructions.append(Add(total, tuple(given)))
            given = [total]
        dtype = one.cast[1] if one.cast else self.types[one.result].dtype
        result = self.contribution(one.value)
        leaf, moves = self.cut.weights.get(one.value), one.backward
        shape = one.before if moves else one.after  # what is only cast is reduced later
        if leaf is not None and dtype == self.builder.dtype(leaf):
            moved = self.builder.reduce(leaf, given[0], result, moves, one.atoms_grad, shape)
        else:
            moved = self.builder.move(given[0], result, moves, one.atoms_grad, shape, dtype)
        self.builder.instructions += moved
        self.give(one.value, result)

    def give(self, name: str, gradient: str) -> None:
        """Add `gradient` to the contributions to the gradient of a value."""
        leaf = self.loads[name].leaf if name in self.loads else name
        if leaf in self.builder.kind:
            is_input = self.builder.kind[leaf] is LeafKind.INPUT
            self.builder.accumulate(self.own(leaf) if is_input else leaf, gradient)
        else:
            self.grads.setdefault(name, []).append(gradient)

    def contribution(self, name: str) -> str:
        """A new name for a contribution to the gradient of a value."""
        known = self.contributions[name]
        self.contributions[name] += 1
        return f"grad/{self.own(name)}{f'.{known}' if known else ''}"

    def value(self, name: str) -> str:
        """The name in the step program of a value of this micro-batch's program."""
        name = self.first_name(name)
        if name in self.loads:
            return self.loads[name].leaf
        kind = self.builder.kind.get(name)
        if kind is not None and kind is not LeafKind.INPUT:
            return name
        if name in self.known_as:
            return self.known_as[name]
        if name in self.builder.shared:
            return f"{self.builder.step.prefix}{name}"
        return f"{self.own(name)}{'~' if name in self.again else ''}"

    def first_name(self, name: str) -> str:
        """The name of the value that redistributions without moves give other names."""
        while (found := self.redistributed.get(name)) and not found.instruction.forward:
            name = found.instruction.value
        return name

    def own(self, name: str) -> str:
        """The name in the step program of a value of this micro-batch alone."""
        return f"{self.builder.step.prefix}{name}{self.tag}"

    def is_trained(self, name: str) -> bool:
        """Whether a gradient of a value of the program is wanted."""
        return self.types[name].trained
