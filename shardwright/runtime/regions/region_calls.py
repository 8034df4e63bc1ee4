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

Gradients = Sequence[torch.Tensor | None]
Arrived = Callable[[Gradients], Gradients]  # takes gradients of inputs, returns what goes on
Exits = Sequence[GradientEdge | None]


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
        self._exits: Exits = ()
        self._gradients: Gradients = ()
        self._again: Mapping[int, torch.Tensor] = {}

    def forward(self, given: Sequence[torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
        """The region's outputs, detached."""
        inputs: list[torch.Tensor] = list(given)
        for i, total in self.totals.items():
            if total not in self._leaves:
                self._leaves[total] = given[i].detach().requires_grad_()
            inputs[i] = self._leaves[total]
        trained = (i for i, wanted in enumerate(self.region.trained) if wanted)
        self._entered = [i for i in trained if i not in self.totals]
        with torch.enable_grad():
            if self._entered:
                enter(inputs, self._entered, self.arrived)
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
        found: list[torch.Tensor | None] = [None] * len(self.region.inputs)
        for name, leaf in self._leaves.items():
            leaf.grad = totals[name]
        self._again = again
        run_backward(self._exits, given)
        for i, gradient in zip(self._entered, self._gradients, strict=False):
            found[i] = gradient
        added = {name: leaf.grad for name, leaf in self._leaves.items()}
        self._leaves, self._exits, self._gradients, self._again = {}, (), (), {}
        return found, added

    def arrived(self, gradients: Gradients) -> Gradients:
        """Store the gradients of the inputs that entered through one node; none goes on."""
        self._gradients = gradients
        return (None,) * len(gradients)

    def _outputs(self, inputs: Sequence[torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
        """Run the region with autograd; note where gradients of its outputs enter."""
        results = self._run(inputs, state)
        self._exits = exits_of(self.region, results)
        return [x.detach() for x in results]

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


def enter(inputs: list[torch.Tensor], positions: Sequence[int], arrived: Arrived) -> None:
    """Replace inputs by what one node of the graph makes of them; it calls `arrived`."""
    if not positions:
        return
    token = torch.empty(0, requires_grad=True)
    entered = _Enter.apply(arrived, token, *(inputs[i] for i in positions))  # type: ignore[no-untyped-call]
    for i, x in zip(positions, entered, strict=True):
        inputs[i] = x


def exits_of(region: Region, results: Sequence[torch.Tensor]) -> Exits:
    """The places in a region's graph at which gradients of its outputs enter."""
    return [
        get_gradient_edge(x) if wanted and x.requires_grad else None
        for x, wanted in zip(results, region.differentiable, strict=True)
    ]


def ends_of(
    exits: Exits, given: Sequence[torch.Tensor | None]
) -> list[tuple[GradientEdge, torch.Tensor]]:
    """The outputs that have a gradient, each with it."""
    return [
        (edge, gradient)
        for edge, gradient in zip(exits, given, strict=True)
        if edge is not None and gradient is not None
    ]


def total_of(gradients: Gradients) -> torch.Tensor | None:
    """The sum, out of place, of the gradients that are not missing."""
    total: torch.Tensor | None = None
    for x in gradients:
        if x is not None:
            total = x if total is None else total + x
    return total


def run_backward(exits: Exits, given: Sequence[torch.Tensor | None]) -> None:
    """Run a graph backward from the gradients of its outputs; what it has saved is freed."""
    if ends := ends_of(exits, given):
        torch.autograd.backward([edge for edge, _ in ends], [gradient for _, gradient in ends])


def _start(tensor: torch.Tensor) -> int:
    """Bytes of the memory before the first element."""
    return int(tensor.storage_offset()) * tensor.element_size()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, arrived: Arrived, _token: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.arrived = arrived
        return tuple(x.detach() for x in given)  # views would take twice as long

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.arrived(gradients))
