"""Runs a step in micro-batches and accumulates their gradients.

Each micro-batch's backward runs right after its forward, so that only one
keeps activations. Autograd sees a single function whose gradients are known
when it returns, and are handed over when its backward comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from shardwright.ir.graph import Graph
from shardwright.program.fx import Special, to_module
from shardwright.program.instructions import Program, writes
from shardwright.program.lower.micro_batches import MicroPrograms, alike, flattened
from shardwright.program.passes import micro_program
from shardwright.runtime.batch import InputPart
from shardwright.runtime.indexed_offsets import Varied, module_of
from shardwright.runtime.parameters.unshard import local
from shardwright.tracing.export.second_derivative import refuse_second_derivative


@final
class MicroBatched(nn.Module):
    """Programs of all micro-batches, called as the program of one whole step is.

    Those that differ only in where their tiles start are one module, unless
    numbers are drawn by kernels that are seeded by it. `inputs` are the leaves,
    by name, that micro-batches take parts of; `make` gives the modules of the
    instructions that are the same for all of them.
    """

    def __init__(
        self,
        lowered: MicroPrograms,
        inputs: Mapping[str, InputPart],
        graph: Graph,
        make: Callable[[Special], nn.Module],
        device: torch.device,
    ) -> None:
        super().__init__()
        place = {leaf.name: i for i, leaf in enumerate(graph.leaves)}
        self.inputs = {place[name]: part for name, part in inputs.items()}
        self.reductions = nn.ModuleDict(
            {str(place[one.value]): make(one) for one in lowered.reductions}
        )
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.programs = nn.ModuleList()
        self.turns: list[tuple[int, int]] = [(0, 0)] * len(lowered.programs)
        apart = graph.habits.rng == "fast"
        groups = [[i] for i in range(len(self.turns))] if apart else alike(lowered.programs)
        for group in groups:
            for turn, number in enumerate(group):
                self.turns[number] = len(self.programs), turn
            members = [lowered.programs[i] for i in group]
            makes = _chosen_by(self.number, members, make, device)
            self.programs.append(to_module(micro_program(members[0], graph), device, makes))

    # Compiled are the programs: what a backward in a forward does no compiler can follow.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Loss and buffers' new contents, of leaves and the random state."""
        given = tuple(local(leaf) for leaf in given)
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in given):
            results: tuple[torch.Tensor, ...] = _Step.apply(self, *given)  # type: ignore[no-untyped-call]
            return results
        return self._run(given, backward=False)

    def step(
        self, given: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """Results, and the gradient of every given tensor that wants one."""
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in given]
        with torch.enable_grad():
            results = self._run(leaves, backward=True)
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None  # what is reduced below is not kept beside its sum
        for at, reduce in self.reductions.items():
            gradient = gradients[int(at)]
            if gradient is not None:
                gradients[int(at)] = reduce(gradient)
        return results, gradients

    def _run(self, given: Sequence[torch.Tensor], *, backward: bool) -> tuple[torch.Tensor, ...]:
        """Sums of what the programs return; `backward` runs after each of them."""
        sums: tuple[torch.Tensor, ...] = ()
        for number, (program, turn) in enumerate(self.turns):
            self.number.fill_(turn)
            mine = [
                self.inputs[at].micro_batch(leaf, number) if at in self.inputs else leaf
                for at, leaf in enumerate(given)
            ]
            terms = self.programs[program](*mine)
            if backward and terms[0].requires_grad:
                terms[0].backward()
                if number == 0:
                    _separate(given)
            terms = [term.detach() for term in terms] if backward else terms
            sums = tuple(a + b for a, b in zip(sums, terms, strict=True)) if sums else tuple(terms)
        return sums


def _separate(leaves: Sequence[torch.Tensor]) -> None:
    """Give each leaf a gradient of its own, as more is added to it in place.

    One that came through views may share the memory of another's.
    """
    seen: set[int] = set()
    for leaf in leaves:
        if leaf.grad is not None:
            if leaf.grad.untyped_storage().data_ptr() in seen:
                leaf.grad = leaf.grad.clone()
            seen.add(leaf.grad.untyped_storage().data_ptr())


def _chosen_by(
    number: torch.Tensor,
    programs: Sequence[Program],
    make: Callable[[Special], nn.Module],
    device: torch.device,
) -> Callable[[Special], nn.Module]:
    """`make`, but where `programs` differ of modules that do what `programs[number]` does."""
    every = zip(*(flattened(program.instructions) for program in programs), strict=True)
    varied: dict[str, list[Varied]] = {}
    for found in every:
        alternatives = [one for one in found if isinstance(one, Varied)]
        if any(one != found[0] for one in alternatives):
            varied[writes(found[0])[0]] = alternatives

    def chosen(instruction: Special) -> nn.Module:
        name = writes(instruction)[0]
        if isinstance(instruction, Varied) and name in varied:
            return module_of(varied[name], number, make(instruction), device)
        return make(instruction)

    return chosen


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: MicroBatched, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, ctx.gradients = how.step(given)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivative("a step in micro-batches", "plan with micro_batches=(1,)")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "backward ran twice through one step in micro-batches, which keeps nothing of it;"
                " call the module again"
            )
        # In place: there is no room for another copy of all gradients.
        scaled = (None if g is None else g.mul_(grads[0].to(g.dtype)) for g in gradients)
        return (None, *scaled)
