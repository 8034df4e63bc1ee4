"""A lower bound of the simulated step time of a plan, without its step program.

In a step program every operator takes its time on the compute stream, and every transfer delays
that stream by the fraction of its time that the machine does not hide, whether it is awaited at
once or later (`simulate/time/step_program.py`). Transfers of parameters and of their gradients
share buckets, which save launches and latencies, but no bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import final

from shardwright.ir.buckets import MOST_FILLED, gather_limit, sum_bucket_bytes
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Phase, Plan, PlannedTransfer
from shardwright.ir.redistribution import Collective, communication_named
from shardwright.machine.model import Machine
from shardwright.machine.topology import links
from shardwright.simulate.costs.collectives import step_price
from shardwright.simulate.time.async_tensor_parallel import AXIS, KINDS, AsyncMessages
from shardwright.simulate.time.program_prices import op_seconds, runs_by_itself

_ROUNDING = 1e-9  # the relative difference of sums in another order


def bandwidth_bound(plan: Plan, graph: Graph, machine: Machine) -> Seconds:
    """A lower bound of the seconds of a simulated step of `plan`; 0 for plans with stages.

    Of all transfers of a value in one phase only the longest counts, because readers may share it.
    """
    if plan.pipeline is not None:
        return Seconds(0.0)
    computed = sum(
        one.forward
        + one.backward
        + sum(seconds for _, seconds in (*one.inner, *one.inner_backward))
        for one in op_seconds(plan, graph, machine).values()
    )
    trained = sum(one.seconds for one in plan.parameters if one.name in graph.trained)
    transfers, messages = _Transfers(plan, graph, machine), AsyncMessages(plan, graph, machine)
    longest: defaultdict[tuple[str, Phase], float] = defaultdict(float)
    for one in plan.transfers:
        if one.consumer and runs_by_itself(one, graph):
            key = one.value, one.phase
            longest[key] = max(longest[key], transfers.least_seconds(one) - _hidden(one, messages))
    exposed = (1 - machine.most_overlap) * sum(longest.values())
    total = plan.micro_batches * computed + trained + exposed
    return Seconds((1 - _ROUNDING) * total)


def _hidden(one: PlannedTransfer, messages: AsyncMessages) -> float:
    """The most seconds of a run of a transfer that matrix products hide, in any forward pass."""
    kinds = [kind for kind in KINDS if f"{kind.value} {AXIS}" in one.collectives]
    backward = one.phase is Phase.BACKWARD
    phases = [one.phase] if backward else [Phase.FORWARD, Phase.RECOMPUTE]
    return sum(
        max(messages.of_value(one.value, kind, phase).hidden for phase in phases) for kind in kinds
    )


@final
class _Transfers:
    """Lower bounds of the seconds of transfers of a plan."""

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        self._machine = machine
        self._links = dict(zip(plan.mesh.names, links(machine, plan.mesh), strict=True))
        self._parameters = {one.name for one in plan.parameters}
        sizes = [one.bytes for one in plan.transfers if one.value in self._parameters]
        sums = sum_bucket_bytes(graph)
        self._largest = max(sizes, default=0)
        # A bucket of sums is full once it has `sums` bytes.
        last = max((size for size in sizes if size < sums), default=0)
        self._summed = MOST_FILLED * max(gather_limit(self._largest), sums) + last

    def least_seconds(self, one: PlannedTransfer) -> float:
        """Seconds of one run of a transfer, with its share of the launches of full buckets.

        A transfer has the bytes of its largest tile, so of several steps only the first of a
        reduction is known to have as many.
        """
        fixed = [
            step_price(communication_named(kind), self._links[axis], self._machine).fixed
            for kind, axis in (step.split(" ") for step in one.collectives)
        ]
        seconds = one.seconds / one.times
        if one.value not in self._parameters:
            return seconds
        share = 0.0
        if one.collectives[0].startswith(Collective.ALL_GATHER.value):
            share = one.bytes / self._gathered(one) if len(fixed) == 1 else 0.0
        elif one.phase is Phase.BACKWARD:
            share = one.bytes / self._summed
        return max(0.0, seconds - sum(fixed) + min(1.0, share) * fixed[0])

    def _gathered(self, one: PlannedTransfer) -> float:
        """The most bytes of a bucket of gathers that this one may be in."""
        return MOST_FILLED * max(gather_limit(self._largest), gather_limit(one.bytes))
