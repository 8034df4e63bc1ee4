"""Runs a region whose backward pass has two parts: for its inputs, and later for its weights.

Zero-bubble schedules need it (arXiv 2401.10241). The first part runs the autograd nodes on paths to
an input. Those that also lead to a weight are the *cuts*: the gradients that arrive there are kept.
The second part starts at the cuts and runs the nodes that lead to weights alone. Only what an
operator shares between the gradients of its input and its weight, such as the statistics of a layer
norm, is computed twice. A weight that a cut also reaches through inputs would be counted twice;
its gradient is computed from the region's outputs, which repeats the path to it. A compiled region
is one node and computes everything in both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardwright.program.step.region import Region
from shardwright.runtime.regions.region_calls import RegionCall, ends_of

Gradient = torch.Tensor | None


@dataclass(eq=False)
class _Cut:
    """A node that leads to inputs and weights, with bits of the weights and arrived gradients."""

    node: Node
    weights: int
    arrived: Sequence[Gradient] = ()

    def note(self, gradients: Sequence[Gradient]) -> None:
        """Called by autograd with what arrives at the node."""
        self.arrived = gradients


@dataclass
class _Reach:
    """For each node, whether it leads to an input, and the weights that it leads to, as bits."""

    inputs: dict[Node, bool] = field(default_factory=dict)
    weights: dict[Node, int] = field(default_factory=dict)


class SplitCall(RegionCall):
    """One run of a region; `weights` are the positions of the inputs that are weights."""

    def __init__(
        self, region: Region, module: Callable[..., Any], weights: Collection[int]
    ) -> None:
        super().__init__(region, module, {})
        self.weights = tuple(weights)
        self._edges: dict[int, GradientEdge] = {}  # of inputs that have a gradient
        self._ends: list[tuple[GradientEdge, torch.Tensor]] = []
        self._cuts: list[_Cut] = []
        self._repeated = 0  # bits of weights whose gradients start at the outputs

    def forward(self, given: Sequence[torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
        """The region's outputs, detached."""
        inputs = list(given)
        with torch.enable_grad():
            for i, wanted in enumerate(self.region.trained):
                if wanted:
                    token = torch.empty(0, requires_grad=True)
                    inputs[i] = _Enter.apply(token, given[i])  # type: ignore[no-untyped-call]
                    self._edges[i] = get_gradient_edge(inputs[i])
            return self._outputs(inputs, state)

    def backward_to_inputs(
        self, given: Sequence[Gradient], again: Mapping[int, torch.Tensor]
    ) -> list[Gradient]:
        """Gradients of the inputs that are not weights; None for one without a gradient."""
        self._ends = ends_of(self._exits, given)
        self._again = again
        self._find_cuts()
        hooks = [cut.node.register_prehook(cut.note) for cut in self._cuts]
        inputs = [i for i in self._edges if i not in self.weights]
        found = self._gradients_of(self._ends, inputs)
        for hook in hooks:
            hook.remove()
        self._again = {}
        return [found.get(i) for i in range(len(self.region.inputs))]

    def backward_to_weights(self, again: Mapping[int, torch.Tensor]) -> list[Gradient]:
        """Gradients of the weights; what was saved is freed."""
        self._again = again
        total: dict[int, torch.Tensor] = {}
        for cut in self._cuts:
            ends = [
                (GradientEdge(cut.node, i), gradient)
                for i, gradient in enumerate(cut.arrived)
                if gradient is not None
            ]
            self._add(total, self._gradients_of(ends, self._of_bits(cut.weights)))
        self._add(total, self._gradients_of(self._ends, self._of_bits(self._repeated)))
        self._edges, self._ends, self._cuts, self._exits, self._again = {}, [], [], (), {}
        return [total.get(i) for i in range(len(self.region.inputs))]

    def _gradients_of(
        self, ends: Sequence[tuple[GradientEdge, torch.Tensor]], inputs: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """The gradients of inputs, by position, from gradients that arrive at `ends`."""
        if not ends or not inputs:
            return {}
        found = torch.autograd.grad(
            [edge for edge, _ in ends],
            [self._edges[i] for i in inputs],
            [gradient for _, gradient in ends],
            retain_graph=True,
            allow_unused=True,
        )
        return {i: x for i, x in zip(inputs, found, strict=True) if x is not None}

    @staticmethod
    def _add(total: dict[int, torch.Tensor], found: Mapping[int, torch.Tensor]) -> None:
        for i, gradient in found.items():
            total[i] = total[i] + gradient if i in total else gradient

    def _of_bits(self, bits: int) -> list[int]:
        return [i for n, i in enumerate(self.weights) if bits >> n & 1 and i in self._edges]

    def _find_cuts(self) -> None:
        """Find the cuts, and the weights whose whole gradient no cut provides."""
        reach = self._reach()
        self._cuts, self._repeated = [], 0
        entered = {edge.node for edge in self._edges.values()}
        for node, to_inputs in reach.inputs.items():
            if not to_inputs or node in entered:
                continue
            aside = through = 0
            for child, _ in node.next_functions:
                if child is not None and reach.inputs[child]:
                    through |= reach.weights[child]
                elif child is not None:
                    aside |= reach.weights[child]
            self._repeated |= aside & through
            if aside:
                self._cuts.append(_Cut(node, aside))
        for edge, _ in self._ends:  # of which nothing leads to an input
            if not reach.inputs[edge.node]:
                self._repeated |= reach.weights[edge.node]
        for cut in self._cuts:
            cut.weights &= ~self._repeated
        self._cuts = [cut for cut in self._cuts if cut.weights]

    def _reach(self) -> _Reach:
        """The inputs and weights that each node leads to, of nodes at which a gradient arrives."""
        found = _Reach()
        for i, edge in self._edges.items():
            is_weight = i in self.weights
            found.inputs[edge.node] = not is_weight
            found.weights[edge.node] = 1 << self.weights.index(i) if is_weight else 0
        waiting = [edge.node for edge, _ in self._ends]
        while waiting:
            node = waiting[-1]
            if node in found.inputs:
                waiting.pop()
                continue
            children = [child for child, _ in node.next_functions if child is not None]
            if left := [child for child in children if child not in found.inputs]:
                waiting += left
                continue
            found.inputs[node] = any(found.inputs[child] for child in children)
            bits = 0
            for child in children:
                bits |= found.weights[child]
            found.weights[node] = bits
            waiting.pop()
        return found


class _Enter(torch.autograd.Function):
    """An input as it is, with a node of its own in the graph that keeps nothing alive."""

    @staticmethod
    def forward(ctx: Any, _token: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient
