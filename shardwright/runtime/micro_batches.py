"""The module that runs a step program with micro-batches.

Each micro-batch's backward pass runs right after its forward pass, so that only one micro-batch
keeps activations. For autograd the step is a single function: its gradients are computed in the
forward call, and returned by its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ir.graph import Graph, LeafKind
from shardwright.program.step.dead_code import forward_only
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.batch import InputPart
from shardwright.runtime.executor.executor import Values
from shardwright.runtime.executor.program_module import ProgramModule
from shardwright.runtime.graph_modules.fx import Special
from shardwright.runtime.parameters.dtensor_spec import check_gradients, local
from shardwright.runtime.parameters.loss_scaling import computes_in_float16
from shardwright.tracing.arguments import BatchError
from shardwright.tracing.export.second_derivative import refuse_second_derivative


@final
class MicroBatched(ProgramModule):
    """The step `program`, called as the program of one whole step is.

    `inputs` are the leaves, by name, that micro-batches take parts of; the others are those of
    `ProgramModule`.
    """

    def __init__(
        self,
        program: StepProgram,
        inputs: Mapping[str, InputPart],
        graph: Graph,
        groups: Mapping[str, dist.ProcessGroup],
        make: Callable[[Special], nn.Module],
        device: torch.device,
    ) -> None:
        super().__init__(program, forward_only(program), graph, groups, make, device)
        self.inputs, self.in_float16 = inputs, computes_in_float16(graph)
        self.names = tuple(leaf.name for leaf in graph.leaves)
        batch = {leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
        self.trained = tuple(
            i
            for i, name in enumerate(self.names)
            if name in dict(program.gradients)
            or (name in batch and graph.tensor[name].requires_grad)
        )

    # Only regions are compiled: a compiler cannot trace a backward pass inside of a forward pass.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Loss and buffers' new contents, of leaves and the random state."""
        *given_leaves, state = given
        leaves = [local(leaf) for leaf in given_leaves]
        if torch.is_grad_enabled() and any(leaves[i].requires_grad for i in self.trained):
            check_gradients(given_leaves)
            results: tuple[torch.Tensor, ...] = _Step.apply(self, state, *leaves)  # type: ignore[no-untyped-call]
            return results
        with torch.no_grad():
            values, _ = self._given(leaves)
            found, _ = self.evaluation.run(values, state)
        return self._results(found)

    def step(
        self, leaves: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """Results, and the gradient of every leaf that wants one."""
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with torch.enable_grad():  # so that gradients of an input's parts are those of the input
            values, slices = self._given(leaves)
        program = self.program
        values.update((seed, self.seed()) for _, seed in program.seeds)
        found, self.ended = self.training_step.run(values, state)
        gradients: list[torch.Tensor | None] = [None] * len(leaves)
        by_name = {name: found[value] for name, value in program.gradients}
        for i in self.trained:
            name = self.names[i]
            if name in self.inputs:
                gradients[i] = _gradient_of_input(leaves[i], slices[name], by_name)
            elif (gradient := by_name[name]) is not None:
                gradients[i] = gradient.view(leaves[i].shape)
        return self._results(found), gradients

    def _given(
        self, leaves: Sequence[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
        """The values that the program begins with, and of each input its micro-batches."""
        by_name = dict(zip(self.names, leaves, strict=True))
        values = {
            name: x.detach().view(self.loads.get(name, x.shape))
            for name, x in by_name.items()
            if name not in self.inputs
        }
        slices: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.inputs}
        for name, number, value in self.program.inputs:
            part = self.inputs[name].micro_batch(by_name[name], number)
            slices[name][value] = part
            values[value] = part.detach()
        return values, slices

    def _results(self, found: Values) -> tuple[torch.Tensor, ...]:
        """The program's results besides gradients: outputs, then updates."""
        names = (*self.program.outputs, *(value for _, value in self.program.updates))
        results = [found[name] for name in names]
        assert all(x is not None for x in results), "only gradients may be missing"
        return tuple(x for x in results if x is not None)


def _gradient_of_input(
    leaf: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    by_name: Mapping[str, torch.Tensor | None],
) -> torch.Tensor | None:
    """The gradient of an input, of those of its micro-batches."""
    known = [(x, g) for name, x in parts.items() if (g := by_name.get(name)) is not None]
    if not known:
        return None
    slices, gradients = [x for x, _ in known], [g for _, g in known]
    (found,) = torch.autograd.grad(slices, [leaf], gradients)
    return found


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: MicroBatched, state: torch.Tensor, *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.may_be_scaled = not (how.in_float16 and how.scale is None)
        results, ctx.gradients = how.step(leaves, state)
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
        if not ctx.may_be_scaled and grads[0].item() >= 2:
            raise BatchError(
                "the loss was scaled after its gradients had been computed in float16, as steps in"
                " micro-batches do in the forward call; use forward_backward(batch, scaler=scaler)"
                " or train_step(optimizer, batch, scaler)"
            )
        # In place: there is no room for another copy of all gradients.
        scaled = (None if g is None else g.mul_(grads[0].to(g.dtype)) for g in gradients)
        return (None, None, *scaled)
