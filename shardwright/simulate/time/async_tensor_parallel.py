"""Messages of tensor parallelism that run beside the matrix products that they feed or send.

An all-gather before products, or a reduce-scatter behind one, is cut into as many chunks as ranks,
and each chunk moves while another is multiplied (Wang et al., "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). A rank has one chunk
itself, so of n chunks n - 1 move while n - 1 are multiplied: with C seconds of messages and P of
products the step takes max(P, C + P / n) in place of C + P, and C - P (n - 1) / n are exposed, if
these are more than 0. Each chunk is a kernel of its own, which takes a launch.

Two implementations are known, by whether layers are compiled:

* `torch.compile` (`torch/_inductor/fx_passes/micro_pipeline_tp.py`): an all-gather beside all
  products that read what arrives, and a reduce-scatter beside the product that it sums, unless
  gradients of several products are added up before it. In the backward pass of a layer these are
  the products for the gradients of inputs.
* TransformerEngine (`tp_comm_overlap` of Megatron-LM, with its defaults): the same, but that the
  reduce-scatter of an input's gradient runs whole beside the products for gradients of weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from shardwright.ir.graph import Graph, Op
from shardwright.ir.plan import Phase, Plan, PlannedOp
from shardwright.ir.redistribution import Collective
from shardwright.machine.model import Machine

AXIS = "tp"
_PRODUCTS = ("linear", "mm", "addmm", "matmul")
KINDS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
# Of a value in a step program: its pipeline stage, whether it is a gradient, and its graph's name.
_NAME = re.compile(r"(grad/)?(?:s\d+\.)?(grad/)?([^/@~]+)")


@dataclass(frozen=True, slots=True)
class Beside:
    """The seconds of products that hide a message, and those that its chunks take in addition."""

    hidden: float = 0.0
    launches: float = 0.0

    def exposed(self, seconds: float) -> float:
        """Seconds of a message of so many that nothing hides, with the launches of its chunks."""
        return max(0.0, seconds - self.hidden) + self.launches


NOTHING = Beside()


@final
@dataclass(frozen=True)
class AsyncMessages:
    """The messages of tensor parallelism of `plan`, a plan of `graph`, and what hides each."""

    plan: Plan
    graph: Graph
    machine: Machine
    _ops: dict[str, PlannedOp] = field(init=False, default_factory=dict)
    _known: dict[tuple[str, Collective, Phase], Beside] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ops.update((op.name, op) for op in self.plan.ops)

    def of_transfer(self, value: str, kind: Collective, channel: str) -> Beside:
        """The products beside a transfer of a step program, by the name of the value it sends."""
        found = _NAME.match(value)
        if found is None or channel != AXIS:
            return NOTHING
        phase = Phase.RECOMPUTE if value.endswith("~") else Phase.FORWARD
        return self.of_value(found[3], kind, Phase.BACKWARD if found[1] or found[2] else phase)

    def of_value(self, value: str, kind: Collective, phase: Phase) -> Beside:
        """The products beside a message of a value, or in the backward pass of its gradient."""
        if not self.plan.async_tp or kind not in KINDS or value not in self.graph.tensor:
            return NOTHING
        key = value, kind, phase
        if key not in self._known:
            self._known[key] = self._beside(*key)
        return self._known[key]

    def _beside(self, value: str, kind: Collective, phase: Phase) -> Beside:
        gathers, backward = kind is Collective.ALL_GATHER, phase is Phase.BACKWARD
        ops = list(_readers(value, self.graph) if gathers != backward else self._makers(value))
        if not ops:
            return NOTHING
        if backward and not gathers and not self.plan.compiled:  # whole, beside those of weights
            return Beside(sum(self._seconds(op, phase, of_weight=True) for op in ops))
        if backward and not gathers and len(ops) > 1:
            return NOTHING
        ranks = dict(self.plan.mesh.axes)[AXIS]
        hidden = sum(self._seconds(op, phase) for op in ops) * (ranks - 1) / ranks
        launch = self.machine.device.launch_seconds
        return Beside(hidden, (ranks - 1) * len(ops) * launch)

    def _makers(self, value: str) -> Iterator[Op]:
        """The product whose result a value is; none if it is another operator's."""
        root = value
        while source := self.graph.tensor[root].alias_of:
            root = source
        maker = self.graph.producer.get(root)
        if maker is not None and maker.kind in _PRODUCTS:
            yield maker

    def _seconds(self, op: Op, phase: Phase, of_weight: bool = False) -> float:
        """Seconds of a product forward, or for the gradient of its input or of its weight.

        Both gradients are taken to need equally long. A recomputed layer runs the products alone
        that it has not kept.
        """
        planned = self._ops.get(op.name)
        if planned is None or (phase is Phase.RECOMPUTE and not planned.runs_again):
            return 0.0
        if phase is not Phase.BACKWARD:
            return planned.forward_seconds / self.plan.micro_batches
        wanted = [self.graph.tensor[name].requires_grad for name in _multiplied(op)]
        if not wanted[of_weight]:
            return 0.0
        return planned.backward_seconds / self.plan.micro_batches / sum(wanted)


def _multiplied(op: Op) -> tuple[str, str]:
    """The input and the weight of a product."""
    first = 1 if op.kind == "addmm" else 0
    return op.operands[first], op.operands[first + 1]


def _readers(value: str, graph: Graph) -> Iterator[Op]:
    """The products that read a value, or a view of it, as their input."""
    for op in graph.consumers[value]:
        if op.kind in _PRODUCTS:
            if _multiplied(op)[0] == value:
                yield op
        elif op.outputs and all(graph.tensor[name].alias_of == value for name in op.outputs):
            for view in op.outputs:
                yield from _readers(view, graph)
