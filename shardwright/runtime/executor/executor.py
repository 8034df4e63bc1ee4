"""Runs the instructions of a step program, one after the other.

The program contains all decisions; the executor reads neither plan nor schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn

from shardwright.program.step.async_pipeline.versions import Version
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Backward,
    Forward,
    Free,
    Gradients,
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
from shardwright.program.step.region import Region
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.comm.local_moves import moved_locally
from shardwright.runtime.device import autocast_dtype, without_autocast
from shardwright.runtime.executor.carried_state import Left
from shardwright.runtime.executor.failures import Failure, refuse_after
from shardwright.runtime.executor.host_memory import HostCopyInFlight, HostMemory
from shardwright.runtime.executor.messages import MessageEnd, Messages
from shardwright.runtime.executor.transfers import Collectives, InFlight, alone_in_memory
from shardwright.runtime.regions.region_calls import RegionCall, total_of
from shardwright.runtime.regions.regions import Regions
from shardwright.runtime.regions.split_calls import SplitCall

Values = dict[str, torch.Tensor | None]
Trace = list[StepInstruction] | None  # the instructions that were run, if somebody asks for them
EndOf = Callable[[Send | Recv], MessageEnd]
MakeVersions = Callable[[Version], Sequence[torch.Tensor]]


class StepExecutor:
    """Prepares one rank's step program for its runs, each of which is a `ProgramRun`.

    Args:
        program: the program after all passes.
        regions: the modules of its regions.
        groups: the process group of each channel of collectives.
        messages: gives this rank's end of a message; by default messages are sent in `groups`.
    """

    def __init__(
        self,
        program: StepProgram,
        regions: Regions,
        groups: Mapping[str, dist.ProcessGroup],
        messages: EndOf | None = None,
    ) -> None:
        self.program, self.regions, self.groups = program, regions, groups
        self.collectives = {
            one.handle: Collectives(one, groups[one.channel], dist.get_rank(groups[one.channel]))
            for one in program.transfers()
        }
        end = messages or (lambda one: Messages(one, groups[one.channel]))
        self.messages = {one.handle: end(one) for one in program.messages()}
        # Messages of the call before, which the first call finds none of.
        carried = () if program.carried is None else program.carried.handles
        self.of_earlier = frozenset(start for _, start in carried)
        read = Counter(name for one in program.instructions for name in reads(one))
        backward = [one for one in program.instructions if isinstance(one, Backward)]
        self.totals = {one.call: dict(one.totals) for one in backward if one.part is Gradients.ALL}
        if program.carried is not None:  # the backward pass has the last name
            for earlier, later in reversed(program.carried.calls):
                self.totals[earlier] = self.totals[later]
        # The positions of weights, for calls whose backward pass has two parts.
        self.weights = {
            one.call: [i for i in range(len(one.made)) if one.made[i] or i in dict(one.totals)]
            for one in backward
            if one.part is Gradients.WEIGHTS
        }
        # Values whose memory their only reader may take.
        self.taken = frozenset(
            name
            for one in program.instructions
            if isinstance(one, Accumulate)
            or (isinstance(one, Transfer) and self.collectives[one.handle].bucket.writes_into)
            for name in reads(one)
            if read[name] == 1 and name not in program.returned
        )
        self.host_memory = HostMemory(regions.device) if any(program.host_copies()) else None
        # The method of a run for each instruction, looked up once, and its argument.
        self.steps = tuple(map(self._step, program.instructions))
        # The position of the update, after which nothing is computed.
        self.end = next(
            (i for i, one in enumerate(program.instructions) if isinstance(one, Update)),
            len(program.instructions),
        )

    def _step(self, one: StepInstruction) -> tuple[Callable[[ProgramRun, Any], None], Any]:
        """The method of a run that runs an instruction, and what it is given."""
        match one:
            case Forward(saves=False):
                return ProgramRun.forward_only, one
            case Forward() if one.call in self.weights:
                return ProgramRun.forward_split, one
            case Forward():
                return ProgramRun.forward, one
            case Backward(part=Gradients.ALL):
                return ProgramRun.backward, one
            case Backward():
                return ProgramRun.backward_part, one
            case Transfer():
                return ProgramRun.transfer, one
            case HostCopy():
                return ProgramRun.copy, one
            case Send():
                return ProgramRun.send, one
            case Recv():
                return ProgramRun.receive, one
            case Wait():
                early = one.handle in self.of_earlier
                method = ProgramRun.wait_for_earlier if early else ProgramRun.wait
                return method, (one, tuple(self.taken.intersection(one.results)))
            case Relayout():
                return ProgramRun.relayout, one
            case Add():
                return ProgramRun.add, one
            case Accumulate():
                return ProgramRun.accumulate, one
            case Free():
                return ProgramRun.free, one.names
            case Seed():
                return ProgramRun.seed, one
            case Version():
                return ProgramRun.version, one
            case Update():
                return ProgramRun.update, one

    def run(
        self, given: Mapping[str, torch.Tensor], state: torch.Tensor
    ) -> tuple[Values, ProgramRun]:
        """Run the program up to its update; return its results by name, and the run to continue."""
        run = self.begin(given, state)
        run.play(self.end)
        return run.results(), run

    def begin(
        self, given: Mapping[str, torch.Tensor], state: torch.Tensor, trace: Trace = None
    ) -> ProgramRun:
        """A run of the program, which has not played anything yet."""
        refuse_after(self.regions.failure)
        return self.new_run(dict(given), state, trace)

    def new_run(self, given: Values, state: torch.Tensor, trace: Trace) -> ProgramRun:
        """A run of its values, which has not played anything yet."""
        return ProgramRun(self, given, state, trace)


class Updater(Protocol):
    """An optimizer, or what makes its step."""

    def step(self) -> Any: ...


class ProgramRun:
    """One run of the program: values, calls whose backward pass is to come, transfers in flight.

    Values that are `owned` share their memory with nothing else, and their reader may overwrite
    it. If the run is `partial`, gradients without contributions remain missing after a transfer;
    otherwise they are zeros, because ranks may differ in which gradients are missing.
    """

    def __init__(
        self, executor: StepExecutor, given: Values, state: torch.Tensor, trace: Trace
    ) -> None:
        self.executor, self.values, self.state, self.trace = executor, given, state, trace
        self.calls: dict[str, RegionCall] = {}
        self.split_calls: dict[str, SplitCall] = {}
        self.in_flight: dict[str, InFlight] = {}
        self.owned: set[str] = set()
        self.partial = False
        self.missing: set[str] = set()  # results of transfers of nothing
        self.position = 0  # of the next instruction
        self.optimizer: Updater | None = None  # that updates the parameters
        self.make_versions: MakeVersions | None = None
        if executor.collectives or executor.messages or executor.host_memory:
            # If the results are dropped, wait for transfers in flight: their buffers are in use.
            finalize(self, _drain, self.in_flight).atexit = False

    @torch.no_grad()
    def play(self, end: int) -> None:
        """Run instructions up to the place `end`."""
        if autocast_dtype(self.device) is not None:  # of a caller of `backward`
            with without_autocast(self.device):
                self.play(end)
            return
        try:
            self.go_on(end)
        except BaseException as e:
            self.fail(e)
            raise

    def go_on(self, end: int) -> None:
        """Run instructions up to the place `end` within an instruction that they are a part of."""
        steps = self.executor.steps
        while self.position < end:
            method, given = steps[self.position]
            method(self, given)
            self.passed()

    def passed(self) -> None:
        """Go on behind the instruction that was run."""
        if self.trace is not None:
            self.trace.append(self.executor.program.instructions[self.position])
        self.position += 1

    def fail(self, error: BaseException) -> None:
        """Free kept values; do not wait for transfers, which other ranks may never start.

        Copies to and from the host are this rank's own, and their memory is in use until they end.
        """
        executor = self.executor
        if executor.collectives or executor.messages:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            executor.regions.failure = Failure(
                executor.program, self.position, dict(self.in_flight), text
            )
        for one in self.in_flight.values():
            if isinstance(one, HostCopyInFlight):
                one.results()
        self.in_flight.clear()
        self.calls.clear()
        self.split_calls.clear()
        self.values.clear()

    def results(self) -> Values:
        """All that the program returns, by name; the run forgets every value."""
        found = {name: self.values.get(name) for name in self.executor.program.returned}
        self.values.clear()
        return found

    def take_over(self, left: Left) -> None:
        """Go on with what the run before has left."""
        self.values.update(left.values)
        self.calls.update(left.calls)
        self.in_flight.update(left.in_flight)

    def leave(self) -> Left:
        """Take out what the next run goes on with."""
        carried = self.executor.program.carried
        assert carried is not None, "the program goes on with nothing"
        return Left(self.values, self.calls, self.in_flight).by_next_names(carried)

    def finish(self, optimizer: Updater) -> None:
        """Play the rest, in which `optimizer` updates the parameters by their gradients."""
        self.optimizer = optimizer
        self.play(len(self.executor.program.instructions))

    def forward_only(self, one: Forward) -> None:
        """Run a region that no backward pass follows."""
        _, module = self.region(one)
        results = module(*(self.tensor(name) for name in one.inputs), self.state)
        self.values.update(zip(one.outputs, (x.detach() for x in results), strict=True))

    def forward(self, one: Forward) -> None:
        """Run a region, and keep what its backward pass needs."""
        region, module = self.region(one)
        call = self.calls[one.call] = RegionCall(region, module, self.executor.totals[one.call])
        results = call.forward([self.tensor(name) for name in one.inputs], self.state)
        self.values.update(zip(one.outputs, results, strict=True))

    def forward_split(self, one: Forward) -> None:
        """Run a region, and keep what the two parts of its backward pass need."""
        region, module = self.region(one)
        split = SplitCall(region, module, self.executor.weights[one.call])
        self.split_calls[one.call] = split
        results = split.forward([self.tensor(name) for name in one.inputs], self.state)
        self.values.update(zip(one.outputs, results, strict=True))

    def backward(self, one: Backward) -> None:
        """Run the backward pass of a call."""
        given = [self.sum_of(names) for names in one.given]
        again = {position: self.tensor(name) for position, name in one.copies}
        totals = {total: self.values.get(total) for _, total in one.totals}
        found, added = self.calls.pop(one.call).backward(given, again, totals)
        self.values.update((n, x) for n, x in zip(one.made, found, strict=True) if n)
        taken = self.executor.taken
        if not added and taken.isdisjoint(one.made):
            return
        alone = alone_in_memory([*given, *found, *added.values()])
        for name, gradient in zip(one.made, found, strict=True):
            if name in taken and id(gradient) in alone:
                self.owned.add(name)
        for name, total in added.items():
            if total is not None and totals[name] is None and id(total) not in alone:
                total = total.clone(memory_format=torch.contiguous_format)
            self.values[name] = total
        self.owned.update(taken.intersection(added))

    def backward_part(self, one: Backward) -> None:
        """Run the backward pass of a call to its inputs, or then to its weights."""
        again = {position: self.tensor(name) for position, name in one.copies}
        if one.part is Gradients.INPUTS:
            given = [self.sum_of(names) for names in one.given]
            found = self.split_calls[one.call].backward_to_inputs(given, again)
        else:
            found = self.split_calls.pop(one.call).backward_to_weights(again)
        for name, gradient in zip(one.made, found, strict=True):
            if name:
                self.values[name] = gradient
        for position, total in one.totals:
            gradient, known = found[position], self.values.get(total)
            if gradient is not None and known is not None:
                known.add_(gradient)
            elif gradient is not None:
                self.values[total] = gradient.clone(memory_format=torch.contiguous_format)
            else:
                self.values.setdefault(total, None)
            if total in self.executor.taken:
                self.owned.add(total)

    def transfer(self, one: Transfer) -> None:
        """Start a collective."""
        given, owned = [], []
        for part in one.parts:
            x = self.values[part.value]
            if x is None:  # a gradient that nothing contributes to
                if self.partial:
                    self.missing.add(part.result)
                x = torch.zeros(part.atoms, dtype=getattr(torch, part.dtype), device=self.device)
            given.append(x)
            owned.append(part.value in self.owned)
        self.in_flight[one.handle] = self.executor.collectives[one.handle].start(given, owned)

    def send(self, one: Send) -> None:
        """Start to send a message."""
        values = [self.values[part.value] for part in one.payload]
        self.in_flight[one.handle] = self.executor.messages[one.handle].send(values, self.device)

    def receive(self, one: Recv) -> None:
        """Start to receive a message."""
        self.in_flight[one.handle] = self.executor.messages[one.handle].receive(self.device)

    def copy(self, one: HostCopy) -> None:
        """Start a copy between the device and its host."""
        memory = self.executor.host_memory
        assert memory is not None, "the program has copies"
        if (value := self.values[one.value]) is None:  # a gradient that nothing contributes to
            self.missing.add(one.result)
        self.in_flight[one.handle] = memory.start(one, value)

    def wait(self, given: tuple[Wait, tuple[str, ...]]) -> None:
        """Wait for a transfer, a message or a copy; some of its results own their memory."""
        one, owned = given
        results = self.in_flight.pop(one.handle).results()
        self.values.update(zip(one.results, results, strict=True))
        self.owned.update(owned)
        for name in self.missing.intersection(one.results):
            self.values[name] = None

    def wait_for_earlier(self, given: tuple[Wait, tuple[str, ...]]) -> None:
        """Wait for a message of an earlier call, if there was one."""
        if given[0].handle in self.in_flight:
            self.wait(given)

    def version(self, one: Version) -> None:
        """Make versions of parameters, in the shapes in which these are given."""
        assert self.make_versions is not None, "the program has versions"
        for (leaf, result), made in zip(one.parameters, self.make_versions(one), strict=True):
            self.values[result] = made.view(self.tensor(leaf).shape)

    def relayout(self, one: Relayout) -> None:
        """Change a value's layout without communication."""
        x = self.values[one.value]
        if x is None:
            self.values[one.result] = None
            return
        moved = moved_locally(x.to(getattr(torch, one.dtype)).reshape(one.atoms), one.local)
        self.values[one.result] = moved.reshape(one.shape).contiguous()

    def add(self, one: Add) -> None:
        """Add up contributions to a gradient."""
        self.values[one.result] = self.sum_of(one.terms)

    def free(self, names: tuple[str, ...]) -> None:
        """Forget values."""
        for name in names:
            self.values.pop(name, None)

    def seed(self, _one: Seed) -> None:
        """The gradients of the results are among the values: the caller put them there."""

    def update(self, _one: Update) -> None:
        """Update the parameters, whose gradients they have, in groups (`update_groups.py`)."""
        assert self.optimizer is not None, "a step without an optimizer ends before its update"
        with torch.enable_grad():  # as its caller has it
            self.optimizer.step()

    def accumulate(self, one: Accumulate) -> None:
        """Add a value to a total."""
        value, total = self.values[one.value], self.values.get(one.total)
        if value is None:
            self.values.setdefault(one.total, None)
        elif total is not None:
            total.add_(value)
        else:
            self.values[one.total] = value if one.value in self.owned else value.clone()
            if one.total in self.executor.taken:
                self.owned.add(one.total)

    def sum_of(self, names: Sequence[str]) -> torch.Tensor | None:
        """The sum, out of place, of the gradients that are not missing."""
        return total_of([self.values[name] for name in names])

    @property
    def device(self) -> torch.device:
        return self.executor.regions.variant.device

    def tensor(self, name: str) -> torch.Tensor:
        """A value, which must not be missing."""
        found = self.values[name]
        assert found is not None, f"%{name} is no gradient, and there"
        return found

    def region(self, one: Forward) -> tuple[Region, nn.Module]:
        """The region of a run, which begins, and its module."""
        regions = self.executor.regions
        regions.running = one
        region = regions.forms[one.region]
        if len(region.variants) > 1:
            regions.variant.fill_(one.variant)
        return region, regions.executed[one.region]


def _drain(in_flight: dict[str, InFlight]) -> None:
    while in_flight:
        in_flight.popitem()[1].results()
