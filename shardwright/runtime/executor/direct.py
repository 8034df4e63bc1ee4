"""Runs a step without communication as one autograd graph, which is equivalent to its program.

Such a program runs its regions forward and, after the seed, backward in the opposite order.
Autograd does the same, without an additional node for each call and each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import Graph
from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Backward,
    Forward,
    Free,
    Gradients,
    Seed,
    Update,
)
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.parameters.dtensor_spec import check_gradients, local
from shardwright.runtime.regions.regions import Regions

# Operators of running statistics, whose results share no memory with what they read.
_NEVER_LATER = frozenset(("lerp", "add"))
_WITHOUT_COMMUNICATION = (Forward, Free, Seed, Backward, Add, Accumulate, Update)


def is_direct(program: StepProgram) -> bool:
    """Whether autograd does what the program says when its regions run one after the other."""
    return all(
        isinstance(one, _WITHOUT_COMMUNICATION) and _runs_once(one) for one in program.instructions
    ) and not any(
        region.communicates or len(region.variants) > 1 or any(region.dropped)
        for region in program.regions
    )


def read_later(graph: Graph) -> frozenset[str]:
    """Updated buffers that the backward pass of such a program, or a caller, may read later."""
    return frozenset(
        buffer
        for buffer, _ in graph.updates
        if buffer in graph.outputs
        or any(op.kind not in _NEVER_LATER or buffer in op.saves for op in graph.consumers[buffer])
    )


def _runs_once(one: object) -> bool:
    if isinstance(one, Backward):
        return one.part is Gradients.ALL and not one.copies
    return not (isinstance(one, Forward) and one.again)


@final
class DirectStep:
    """The forward part of a program for which `is_direct` holds, as autograd differentiates it.

    `names` are the names of the leaves. `whole` converts this rank's gradient of a leaf, by its
    index, to the gradient of the parameter.
    """

    def __init__(
        self,
        program: StepProgram,
        regions: Regions,
        names: Sequence[str],
        whole: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self.regions, self.names, self.whole = regions, tuple(names), whole
        self.shapes = {load.leaf: load.shape for load in program.loads}
        self.trained = frozenset(name for name, _ in program.gradients)
        self.updates = tuple(value for _, value in program.updates)
        self.outputs = program.outputs
        self.instructions = [one for one in program.instructions if isinstance(one, Forward)]

    def run(self, leaves: Sequence[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs, and then updates, of leaves and the random state."""
        values: dict[str, torch.Tensor] = {}
        for name, leaf in zip(self.names, self._tiles(leaves), strict=True):
            x = leaf if name in self.trained or not leaf.requires_grad else leaf.detach()
            shape = self.shapes.get(name)
            values[name] = x if shape is None or x.shape == shape else x.view(shape)
        for one in self.instructions:
            self._forward(one, values, state)
        outputs = [values[name] for name in self.outputs]
        return (*outputs, *(values[name].detach() for name in self.updates))

    def _forward(self, one: Forward, values: dict[str, torch.Tensor], state: torch.Tensor) -> None:
        regions = self.regions
        regions.running = one
        given = [values[name] for name in one.inputs]
        if one.saves:
            found = regions.executed[one.region](*given, state)
        else:
            with torch.no_grad():
                found = regions.executed[one.region](*given, state)
        wanted = regions.forms[one.region].differentiable
        for name, x, differentiable in zip(one.outputs, found, wanted, strict=True):
            values[name] = x if differentiable or not x.requires_grad else x.detach()

    def _tiles(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """This rank's tiles, behind one node of the graph for all that have a gradient."""
        sharded = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
        if not sharded:
            return leaves
        tiles = list(leaves)
        trained = [i for i in sharded if leaves[i].requires_grad]
        for i in sharded:
            if not leaves[i].requires_grad:
                tiles[i] = local(leaves[i])
        if trained:
            given = [leaves[i] for i in trained]
            for i, x in zip(trained, _Tiles.apply(self.whole, trained, *given), strict=True):  # type: ignore[no-untyped-call]
                tiles[i] = x
        return tiles


class _Tiles(torch.autograd.Function):
    """Tiles of DTensors; `to_local` is a node for each, whose backward pass costs more."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
        numbers: Sequence[int],
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.whole, ctx.numbers, ctx.leaves = whole, numbers, leaves
        return tuple(local(leaf).detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            check_gradients(ctx.leaves)
        found = (
            None if gradient is None else ctx.whole(number, leaf, gradient)
            for number, leaf, gradient in zip(ctx.numbers, ctx.leaves, grads, strict=True)
        )
        return (None, None, *found)
