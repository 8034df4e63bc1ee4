"""Runs regions forward and backward, each with an autograd graph of its own.

A region's inputs enter its graph through one node, whose backward pass receives their gradients. So
only the operators that save an input keep it alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from shardwright.program.step.region import Region
from shardwright.runtime.parameters.storage_view import StorageView


@dataclass(frozen=True, slots=True, eq=False)
class _Again:
    """A view of an input that is not saved, but passed again to the backward pass."""

    position: int  # of the input
    view: StorageView  # from the first element of the input


class RegionCall:
    """One run of a region whose backward pass will follow.

    `totals` names, by input position, the totals to which gradients are added: these inputs are
    leaves of the graph, and autograd accumulates into their `grad`.
    """

    def __init__(
        self, region: Region, module: Callable[..., Any], totals: Mapping[int, str]
    ) -> None:
        self.region, self.module, self.totals = region, module, totals
        self._leaves: dict[str, torch.Tensor] = {}
        self._entered: list[int] = []
        self._exits: list[GradientEdge | None] = []
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._again: Mapping[int, torch.Tensor] = {}

    def forward(self, given: Sequence[torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
        """The region's outputs, detached."""
        inputs = list(given)
        for i, total in self.totals.items():
            if total not in self._leaves:
                self._leaves[total] = given[i].detach().requires_grad_()
            inputs[i] = self._leaves[total]
        trained = (i for i, wanted in enumerate(self.region.trained) if wanted)
        self._entered = [i for i in trained if i not in self.totals]
        with torch.enable_grad():
            if self._entered:
                token = torch.empty(0, requires_grad=True)
                entered = _Enter.apply(self, token, *(given[i] for i in self._entered))  # type: ignore[no-untyped-call]
                for i, x in zip(self._entered, entered, strict=True):
                    inputs[i] = x
            found = self._outputs(inputs, state)
        for i, total in self.totals.items():
            # Autograd needs the shape of a leaf alone, and no memory of one that is passed again.
            if self.region.dropped[i] and self.region.is_of_torch:
                leaf = self._leaves[total]
                leaf.data = leaf.new_empty(1).expand(leaf.shape)
        return found

    def backward(
        self,
        given: Sequence[torch.Tensor | None],
        again: Mapping[int, torch.Tensor],
        totals: Mapping[str, torch.Tensor | None],
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor | None]]:
        """Gradients of the inputs, None where there is none, and the new totals.

        What was saved is freed.
        """
        ends = self._ends_of(given)
        found: list[torch.Tensor | None] = [None] * len(self.region.inputs)
        for name, leaf in self._leaves.items():
            leaf.grad = totals[name]
        if ends:
            self._again = again
            edges, gradients = [edge for edge, _ in ends], [gradient for _, gradient in ends]
            torch.autograd.backward(edges, gradients)
            for i, gradient in zip(self._entered, self._gradients, strict=False):
                found[i] = gradient
        added = {name: leaf.grad for name, leaf in self._leaves.items()}
        self._leaves, self._exits, self._gradients, self._again = {}, [], (), {}
        return found, added

    def arrived(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Store the gradients of the inputs that entered through one node; they are complete."""
        self._gradients = gradients

    def _outputs(self, inputs: Sequence[torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
        """Run the region with autograd; note where gradients of its outputs enter."""
        results = self._run(inputs, state)
        self._exits = [
            get_gradient_edge(x) if wanted and x.requires_grad else None
            for x, wanted in zip(results, self.region.differentiable, strict=True)
        ]
        return [x.detach() for x in results]

    def _ends_of(
        self, given: Sequence[torch.Tensor | None]
    ) -> list[tuple[GradientEdge, torch.Tensor]]:
        """The outputs that have a gradient, each with it."""
        return [
            (edge, gradient)
            for edge, gradient in zip(self._exits, given, strict=True)
            if edge is not None and gradient is not None
        ]

    def _run(self, inputs: Sequence[torch.Tensor], state: torch.Tensor) -> Sequence[torch.Tensor]:
        """The region's outputs; dropped inputs are not saved."""
        dropped = {
            inputs[i].untyped_storage().data_ptr(): i
            for i, wanted in enumerate(self.region.dropped)
            if wanted
        }
        if not dropped:
            found: Sequence[torch.Tensor] = self.module(*inputs, state)
            return found

        # Autograd keeps `pack` with what it packs, so that it must not hold the inputs.
        starts = {i: _start(inputs[i]) for i in dropped.values()}

        def pack(kept: torch.Tensor) -> torch.Tensor | _Again:
            position = dropped.get(kept.untyped_storage().data_ptr())
            if position is None:
                return kept
            return _Again(position, StorageView.of(kept).shifted(-starts[position]))

        with saved_tensors_hooks(pack, self._unpack):
            found = self.module(*inputs, state)
            return found

    def _unpack(self, kept: torch.Tensor | _Again) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        copy = self._again[kept.position]
        return kept.view.shifted(_start(copy)).on(copy)


def _start(tensor: torch.Tensor) -> int:
    """Bytes of the memory before the first element."""
    return int(tensor.storage_offset()) * tensor.element_size()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: RegionCall, _token: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.arrived = call.arrived
        return tuple(x.view_as(x) for x in given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.arrived(gradients)
        return (None,) * (len(gradients) + 2)
