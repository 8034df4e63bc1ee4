"""Runs the backward passes of several regions by one call of autograd.

To start autograd takes as long as several small operators. Where a backward pass takes nothing but
what the passes right before it have made, the graphs of these regions are connected, and one call
runs them all. What the program does in between, as starting a transfer, is done at the node through
which the inputs of a region enter its graph: autograd runs nodes in the opposite order of that in
which they were made, so all of the region is over by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, final
from weakref import ref

import torch
import torch.distributed as dist

from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Free,
    Seed,
    StepInstruction,
    reads,
)
from shardwright.program.step.instructions import Gradients as Part
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.executor.executor import ProgramRun, StepExecutor, Trace, Values
from shardwright.runtime.executor.transfers import alone_in_memory
from shardwright.runtime.regions.region_calls import (
    Arrived,
    Exits,
    Gradients,
    enter,
    exits_of,
    run_backward,
)
from shardwright.runtime.regions.regions import Regions

Passes = tuple[Backward, ...]


def connected_passes(program: StepProgram, stops: Collection[int]) -> tuple[Passes, ...]:
    """Backward passes, two or more each, that one call of autograd can run.

    `stops` are positions before which a run of the program may end: none is between two of them.
    """
    chains = _Chains(program)
    for at, one in enumerate(program.instructions):
        if at in stops or isinstance(one, Forward | Seed):
            chains.end()
        if isinstance(one, Backward):
            chains.add(at, one)
    chains.end()
    return tuple(chains.found)


class _Chains:
    """The backward passes of a program, which are added one by one."""

    def __init__(self, program: StepProgram) -> None:
        self.regions = program.regions
        runs: defaultdict[str, list[Forward]] = defaultdict(list)
        self.readers: defaultdict[str, set[int]] = defaultdict(set)
        for at, one in enumerate(program.instructions):
            if isinstance(one, Forward):
                runs[one.call].append(one)
            if not isinstance(one, Free):
                for name in reads(one):
                    self.readers[name].add(at)
        self.forward = {call: ones[0] for call, ones in runs.items() if len(ones) == 1}
        self.returned = {*program.returned, *(value for _, value in program.gradients)}
        self.found: list[Passes] = []
        self.last: list[Backward] = []
        self.made: defaultdict[str, list[str]] = defaultdict(list)  # value -> its gradients

    def end(self) -> None:
        """End the chain."""
        if len(self.last) > 1:
            self.found.append(tuple(self.last))
        self.last = []
        self.made.clear()

    def add(self, at: int, one: Backward) -> None:
        """Add the pass at a position to the chain, or begin another one."""
        if not self._suits(one):
            self.end()
            return
        if not self._continues(at, one):
            self.end()
        self.last.append(one)
        trained = self.regions[one.region].trained
        inputs = self.forward[one.call].inputs
        for value, name, wanted in zip(inputs, one.made, trained, strict=True):
            if wanted:
                self.made[value].append(name)

    def _suits(self, one: Backward) -> bool:
        """Whether the graph of a region may be connected to others."""
        if one.call not in self.forward or one.part is not Part.ALL or one.copies or one.totals:
            return False
        region = self.regions[one.region]
        return not region.communicates and not any(region.dropped)

    def _continues(self, at: int, one: Backward) -> bool:
        """Whether a pass takes gradients of the chain alone, and all that it makes of its values.

        Nothing else reads these.
        """
        outputs = self.forward[one.call].outputs
        gradients = [name for names in one.given for name in names]
        return (
            bool(gradients)
            and all(
                sorted(names) == sorted(self.made.get(value, ()))
                for value, names in zip(outputs, one.given, strict=True)
            )
            and all(self.readers[name] == {at} for name in gradients)
            and self.returned.isdisjoint(gradients)
        )


class _Place(NamedTuple):
    """A region's backward pass in a chain."""

    passes: Passes
    number: int
    position: int  # in the program
    entering: tuple[int, ...]  # the inputs that have a gradient
    joints: frozenset[int]  # those of them that come with the graph of another region of the chain


@final
class ConnectedExecutor(StepExecutor):
    """Runs a program whose runs end at `stops` alone, with connected backward passes."""

    def __init__(
        self,
        program: StepProgram,
        regions: Regions,
        groups: Mapping[str, dist.ProcessGroup],
        stops: Collection[int],
    ) -> None:
        at = {
            one.call: place
            for place, one in enumerate(program.instructions)
            if isinstance(one, Backward)
        }
        chain = {
            one.call: (passes, number)
            for passes in connected_passes(program, stops)
            for number, one in enumerate(passes)
        }
        made_by: dict[str, Passes] = {}  # value -> the chain of the region that makes it, behind
        self.places: dict[str, _Place] = {}
        for one in program.instructions:
            if not isinstance(one, Forward) or one.call not in chain:
                continue
            passes, number = chain[one.call]
            trained = program.regions[one.region].trained
            entering = tuple(i for i, wanted in enumerate(trained) if wanted)
            joints = frozenset(i for i in entering if made_by.get(one.inputs[i]) is passes)
            self.places[one.call] = _Place(passes, number, at[one.call], entering, joints)
            if number:
                given = zip(one.outputs, passes[number].given, strict=True)
                made_by.update((value, passes) for value, names in given if names)
        self.joints = frozenset(made_by)
        super().__init__(program, regions, groups)

    def _step(self, one: StepInstruction) -> tuple[Any, Any]:
        match one:
            case Forward() if one.call in self.places:
                return ConnectedRun.forward_connected, one
            case Backward() if one.call in self.places:
                return ConnectedRun.backward_connected, one
            case Free() if not self.joints.isdisjoint(one.names):
                return ConnectedRun.free_joints, one.names
        return super()._step(one)

    def new_run(self, given: Values, state: torch.Tensor, trace: Trace) -> ProgramRun:
        return ConnectedRun(self, given, state, trace)


@final
class ConnectedRun(ProgramRun):
    """A run of a `ConnectedExecutor`'s program."""

    executor: ConnectedExecutor

    def __init__(
        self, executor: ConnectedExecutor, given: Values, state: torch.Tensor, trace: Trace
    ) -> None:
        super().__init__(executor, given, state, trace)
        self.graphs: dict[str, torch.Tensor] = {}  # values that other regions go on from
        self.exits: dict[str, Exits] = {}  # of the regions whose pass comes first, by call
        self.passes: Passes = ()  # that run now
        self.over = 0  # how many of them are over

    def forward_connected(self, one: Forward) -> None:
        """Run a region, whose graph goes on from those of others."""
        region, module = self.region(one)
        place = self.executor.places[one.call]
        inputs = [
            self.graphs[name] if i in place.joints else self.tensor(name)
            for i, name in enumerate(one.inputs)
        ]
        with torch.enable_grad():
            enter(inputs, place.entering, _arrived(self, one))
            results = module(*inputs, self.state)
        if not place.number:
            self.exits[one.call] = exits_of(region, results)
        for name, x in zip(one.outputs, results, strict=True):
            self.values[name] = x.detach()
            if name in self.executor.joints:
                self.graphs[name] = x

    def free_joints(self, names: tuple[str, ...]) -> None:
        """Forget values with their graphs."""
        for name in names:
            self.graphs.pop(name, None)
        self.free(names)

    def backward_connected(self, one: Backward) -> None:
        """Run a pass and those connected to it, and what the program does between them."""
        self.passes, self.over = self.executor.places[one.call].passes, 0
        given = [self.sum_of(names) for names in one.given]
        run_backward(self.exits.pop(one.call), given)
        self._reach(len(self.passes))

    def arrived(self, place: _Place, found: Gradients) -> Gradients:
        """Go on to the next pass of a chain from one whose gradients are `found`.

        Returns those that go on to other regions.
        """
        assert place.passes is self.passes and place.number >= self.over, "passes run in order"
        self._reach(place.number)
        one = self.passes[place.number]
        given = [self.values.get(name) for names in one.given for name in names]
        alone = alone_in_memory([*given, *found])
        for i, gradient in zip(place.entering, found, strict=True):
            if name := one.made[i]:
                self.values[name] = gradient
                if name in self.executor.taken and id(gradient) in alone:
                    self.owned.add(name)
        self._end_pass()
        return [
            gradient if i in place.joints else None
            for i, gradient in zip(place.entering, found, strict=True)
        ]

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.graphs.clear()
        self.exits.clear()

    def _reach(self, number: int) -> None:
        """End the passes before `number` that got no gradients."""
        while self.over < number:
            self.values.update(dict.fromkeys(filter(None, self.passes[self.over].made)))
            self._end_pass()

    def _end_pass(self) -> None:
        """Go on to the next pass; behind the last one the run goes on by itself."""
        self.over += 1
        if self.over < len(self.passes):
            self.passed()
            self.go_on(self.executor.places[self.passes[self.over].call].position)


def _arrived(run: ConnectedRun, one: Forward) -> Arrived:
    """Tell a run, which this does not keep alive, gradients of the inputs of a region."""
    known, place = ref(run), run.executor.places[one.call]

    def arrived(found: Gradients) -> Gradients:
        here = known()
        assert here is not None, "its backward pass runs"
        return here.arrived(place, found)

    return arrived
