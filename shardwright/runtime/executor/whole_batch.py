"""The module that runs a step program without micro-batches.

A call runs the forward part, and autograd the backward part (`executor/gradient_nodes.py`). A
second backward pass through one call repeats the forward part on the same arguments. If the
backward pass is differentiated or traced by a compiler, the forward program runs directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.options.mixed_precision import MASTER, master_weights
from shardwright.program.step.dead_code import forward_only, without_update
from shardwright.program.step.instructions import (
    Part,
    Relayout,
    StepInstruction,
    Transfer,
)
from shardwright.program.step.optimize import PASSES, STEP_PASSES, optimized
from shardwright.program.step.passes.free import free
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.executor.call_program import CallProgram
from shardwright.runtime.executor.direct import DirectStep, is_direct, read_later
from shardwright.runtime.executor.executor import ProgramRun, Updater
from shardwright.runtime.graph_modules.fx import Special
from shardwright.runtime.parameters.dtensor_spec import DTensorSpec, check_gradients, local, tiles
from shardwright.runtime.regions.gradient_nodes import Gradients, with_nodes
from shardwright.runtime.regions.regions import Regions
from shardwright.tracing.torch_private import version_of

Dtypes = tuple[torch.dtype, ...]


@final
class WholeBatch(nn.Module):
    """The step that is lowered to `naive`, called with one tensor per leaf and the random state.

    `plain` is the forward program as one module; `groups` has that of each axis; `make`: `Regions`.
    """

    def __init__(
        self,
        naive: StepProgram,
        plain: nn.Module,
        graph: Graph,
        groups: Mapping[str, dist.ProcessGroup],
        make: Callable[[Special], nn.Module],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.plain, self.update_parts = plain, naive.update_parts
        self.naive, self.program = naive, optimized(without_update(naive), PASSES)
        self.regions = Regions(self.program.regions, make, device)
        self.groups = groups
        self.names = tuple(leaf.name for leaf in graph.leaves)
        self.loads = {load.leaf: load.shape for load in naive.loads}
        self.parameters_at = tuple(
            i for i, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.PARAMETER
        )
        # Names of outputs, then of updates.
        self.returned = (*naive.outputs, *(value for _, value in naive.updates))
        values = [*graph.outputs, *(value for _, value in graph.updates)]
        tensors = [graph.tensor[name] for name in values]
        self.forms = {
            name: (tensor.shape, getattr(torch, tensor.dtype))
            for name, tensor in zip(self.returned, tensors, strict=True)
        }
        self.parameters_named = tuple(self.names[i] for i in self.parameters_at)
        # Updated buffers, and those of them that autograd may read after their update.
        updated = {name for name, _ in graph.updates}.difference(self.parameters_named)
        later = read_later(graph)
        self.updated_at = tuple(i for i, name in enumerate(self.names) if name in updated)
        self.read_later_at = tuple(i for i in self.updated_at if self.names[i] in later)
        trained = {name for name, _ in naive.gradients}
        self.trained = tuple(i for i, name in enumerate(self.names) if name in trained)
        masters = master_weights(graph)
        planned = (MASTER if n in masters else graph.tensor[n].dtype for n in self.parameters_named)
        self.planned: Dtypes = tuple(getattr(torch, dtype) for dtype in planned)
        self._call_programs: dict[tuple[str, Dtypes], CallProgram] = {}
        self._places: dict[int, DTensorSpec] = {}  # of parameters, by number
        self._step = WholeStep()

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs and buffers' new contents, of leaves and the random state."""
        *leaves, state = given
        if torch.compiler.is_compiling():
            _copy_at(self.updated_at, leaves)
            return tuple(self.plain(*tiles(leaves, self.regions.variant), state))
        if torch.is_grad_enabled() and any(leaves[i].requires_grad for i in self.trained):
            step = self._step
            program = self.program_for("call" if step.calls is None else "step", leaves)
            if program.direct is not None:
                _copy_at(self.read_later_at, leaves)
                return program.direct.run(leaves, state)
            _copy_at(self.updated_at, leaves)
            call = ModuleCall(self, leaves, state, program)
            if step.calls is not None:
                call.is_step = True
                step.calls.append(call)
            groups = [[leaves[i] for i in numbers] for numbers in call.program.numbers]
            kept = [x for i, x in enumerate(leaves) if i not in call.parameters]
            return with_nodes(call, groups, [state, *kept])
        _copy_at(self.updated_at, leaves)
        with torch.no_grad():
            run = self.program_for("evaluation", leaves).executor.begin(self.values(leaves), state)
            run.play(len(run.executor.program.instructions))
        return tuple(run.tensor(name) for name in self.returned)

    def whole_steps(self) -> AbstractContextManager[None]:
        """A context; results of a call inside of it are available when it ends, not before."""
        return self._step

    def returns_late(self) -> bool:
        """Whether a result of this step's calls so far is only available when it ends."""
        return any(call.is_late for call in self._step.calls or ())

    def update(self, optimizer: Updater) -> None:
        """The last whole step's update of the parameters."""
        run, self._step.ended = self._step.ended, None
        if run is None:  # autograd ran the step, or nothing is trained
            optimizer.step()
        else:
            run.finish(optimizer)

    def values(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs of a program, from this rank's tensors of all leaves."""
        found = {}
        for name, leaf in zip(self.names, leaves, strict=True):
            x = local(leaf).detach()
            shape = self.loads.get(name)
            found[name] = x if shape is None or x.shape == shape else x.view(shape)
        return found

    def program_for(self, kind: str, leaves: Sequence[torch.Tensor]) -> CallProgram:
        """The program for a "call", a whole "step" or "evaluation", on leaves of these dtypes."""
        dtypes = tuple(leaves[i].dtype for i in self.parameters_at)
        if (known := self._call_programs.get((kind, dtypes))) is not None:
            return known
        if kind == "call":
            program = self.program
        elif kind == "step":
            program = optimized(self.naive, STEP_PASSES)
        else:
            program = free(forward_only(self.program))
        program = _in_dtypes(program, self.planned, dtypes)
        made = CallProgram.of(program, self.regions, self.groups, self.names)
        if is_direct(program):
            direct = DirectStep(program, self.regions, self.names, self.whole)
            made = replace(made, direct=direct)
        self._call_programs[kind, dtypes] = made
        return made

    def whole(self, number: int, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a leaf, made from this rank's part of it."""
        if not isinstance(leaf, DTensor):
            return gradient if gradient.shape == leaf.shape else gradient.view(leaf.shape)
        known = self._places.get(number)
        if known is None or not known.suits(leaf):
            known = self._places[number] = DTensorSpec(leaf)
        shape = known.local_shape
        return known.whole(gradient if gradient.shape == shape else gradient.view(shape))


class WholeStep(AbstractContextManager[None]):
    """The calls of a module within a step, which goes on to its end when the context is left.

    Not attributes of the module, for which assignments take microseconds.
    """

    __slots__ = ("calls", "ended")

    def __init__(self) -> None:
        self.calls: list[ModuleCall] | None = None  # None outside of a step
        self.ended: ProgramRun | None = None  # whose update is to come

    def __enter__(self) -> None:
        self.calls, self.ended = [], None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                for call in self.calls or ():
                    self.ended = call.finish()
        finally:
            self.calls = None


@final
class ModuleCall:
    """One call of a module, from its forward part until its gradients are handed over."""

    def __init__(
        self,
        module: WholeBatch,
        leaves: Sequence[torch.Tensor],
        state: torch.Tensor,
        program: CallProgram,
    ) -> None:
        self.module, self.program = module, program
        self.parameters = {i: leaves[i] for i in module.parameters_at}
        with torch.no_grad():
            values = module.values(leaves)
            self._run: ProgramRun | None = program.executor.begin(values, state)
            self._run.play(program.seed)
            self._late: list[tuple[str, torch.Tensor]] = []  # outputs that are not there yet
            self._results = [self._result(name) for name in module.returned]
        self._given = _Unchanged([values[name] for name in module.parameters_named])
        self._read = _Unchanged([self._run.tensor(name) for name in program.read_later])
        self._stash: dict[int, torch.Tensor | None] | None = None
        self._backward: ProgramRun | None = None
        self.is_step = False  # whether it goes on to the end of the step

    def _result(self, name: str) -> torch.Tensor:
        assert self._run is not None, "its forward part was played"
        found = self._run.values.get(name)
        if found is None:
            shape, dtype = self.module.forms[name]
            found = torch.zeros(shape, dtype=dtype, device=self.module.regions.variant.device)
            self._late.append((name, found.detach()))
            return found
        return found.detach()  # an object of its own: autograd makes it the result of a node

    @property
    def is_late(self) -> bool:
        """Whether results are still to come."""
        return bool(self._late)

    def results(self) -> tuple[torch.Tensor, ...]:
        """Outputs and updates; once."""
        found, self._results = tuple(self._results), []
        return found

    def constants(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Results without a gradient."""
        trained = {number for number, _ in self.program.seeds}
        return [x for i, x in enumerate(results) if i not in trained]

    def begin(self, gradients: Gradients, kept: Sequence[torch.Tensor]) -> None:
        """Repeat the forward part if it was freed, and pass it the gradients of the results."""
        if torch.is_grad_enabled():
            self._stash = self._differentiated(gradients, kept)
            return
        check_gradients(self.parameters.values())
        run, self._run, self._stash = self._run, None, None
        if run is None:
            run = self._again(kept)
        else:
            self._read.check()
        for number, seed in self.program.seeds:
            run.values[seed] = gradients[number]
            run.partial |= gradients[number] is None
        self._backward = run

    def gradients(self, group: int) -> Gradients:
        """Play on until a group's gradients are final."""
        if self._stash is not None:
            return [self._stash[i] for i in self.program.numbers[group]]
        run = self._backward
        assert run is not None, "its results have a node before"
        found, end = self.program.groups[group]
        last = group + 1 == len(self.program.groups)
        run.play(run.executor.end if last else end)
        if last and not self.is_step:
            self._backward = None
        return [
            None if (tile := run.values.pop(value, None)) is None else self._whole(i, tile)
            for i, (_, value) in zip(self.program.numbers[group], found, strict=True)
        ]

    def finish(self) -> ProgramRun | None:
        """Copy late results to the tensors that were returned for them.

        Returns the run, whose update is still to run; None if there was no backward pass.
        """
        run, self._backward = self._backward, None
        if run is None:
            return None
        with torch.no_grad():
            run.play(run.executor.end)
            for name, place in self._late:
                place.copy_(run.tensor(name))
        run.values.clear()
        return run

    def _whole(self, number: int, tile: torch.Tensor) -> torch.Tensor | None:
        leaf = self.parameters.get(number)
        if leaf is None:
            return tile
        return self.module.whole(number, leaf, tile) if leaf.requires_grad else None

    def _leaves(self, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All leaves, of parameters and of what autograd kept."""
        others = iter(kept)
        found = [
            self.parameters[i] if i in self.parameters else next(others)
            for i in range(len(self.module.names))
        ]
        self._given.check()
        return found

    def _again(self, kept: Sequence[torch.Tensor]) -> ProgramRun:
        """The forward part played once more."""
        state, *others = kept
        with torch.no_grad():
            values = self.module.values(self._leaves(others))
        run = self.program.executor.begin(values, state)
        run.play(self.program.seed)
        return run

    def _differentiated(
        self, gradients: Gradients, kept: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor | None]:
        """The gradients of all leaves, which autograd can differentiate."""
        state, *others = kept
        leaves, trained = self._leaves(others), self.module.trained
        results = self.module.plain(*tiles(leaves, self.module.regions.variant), state)
        ends = [
            (x, gradient)
            for x, gradient in zip(results, gradients, strict=True)
            if gradient is not None and x.requires_grad
        ]
        wanted = [i for i in trained if leaves[i].requires_grad]
        found: dict[int, torch.Tensor | None] = dict.fromkeys(trained)
        if ends and wanted:
            slopes = torch.autograd.grad(
                [x for x, _ in ends],
                [leaves[i] for i in wanted],
                [gradient for _, gradient in ends],
                create_graph=True,
                allow_unused=True,
            )
            found.update(zip(wanted, slopes, strict=True))
        return found


class _Unchanged:
    """Tensors that a backward pass will read again, as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [x for x in tensors if not x.is_inference()]
        self._versions = [version_of(x) for x in self._tensors]

    def check(self) -> None:
        """Raise `RuntimeError` if one was written to."""
        if [version_of(x) for x in self._tensors] != self._versions:
            raise RuntimeError(
                "a parameter, an input or a result of the module was modified by an in-place"
                " operation between its forward and its backward pass, which reads it again; run"
                " backward first, or change a copy"
            )


def _copy_at(places: Sequence[int], leaves: list[torch.Tensor]) -> None:
    """Replace leaves by copies, because what they are made of is updated in place."""
    for i in places:
        leaves[i] = leaves[i].clone()


def _in_dtypes(program: StepProgram, planned: Dtypes, given: Dtypes) -> StepProgram:
    """`program` for parameters that were cast to other dtypes than they were planned in."""
    others = {
        str(a).removeprefix("torch."): str(b).removeprefix("torch.")
        for a, b in zip(planned, given, strict=True)
        if a is not b
    }
    if not others:
        return program

    def cast(one: StepInstruction) -> StepInstruction:
        if isinstance(one, Transfer):
            return replace(one, parts=tuple(recast(part) for part in one.parts))
        if isinstance(one, Relayout):
            return replace(one, dtype=others.get(one.dtype, one.dtype))
        return one

    def recast(part: Part) -> Part:
        return replace(part, dtype=others.get(part.dtype, part.dtype))

    return replace(program, instructions=tuple(map(cast, program.instructions)))
