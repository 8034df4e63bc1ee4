"""Estimates by how much a simulated step is longer than the seconds that a search adds up.

A search adds up operators and what they do not hide of messages of parameters. In a step program
operators also wait for messages that are late, for about the same part of their seconds in all
plans on one mesh. Once a few of these are simulated, another one is worth a simulation only if it
would be faster than the best plan with most of the least such part.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Plan

_EXPECTED = 0.75  # of the least part that was found, what is expected of other plans


@final
class Stalls:
    """The least part of the seconds of messages of parameters that operators wait in addition.

    It is kept for each mesh, number of micro-batches and of stages.
    """

    def __init__(self) -> None:
        self._least: dict[Hashable, float] = {}

    def learn(self, plan: Plan, simulated: Seconds) -> None:
        """Keep what the simulation of a plan, which has additive seconds, has found."""
        sent = _sent_seconds(plan)
        if sent > 0:
            part = max(0.0, simulated - plan.step_seconds) / sent
            self._least[_group(plan)] = min(part, self._least.get(_group(plan), part))

    def likely_seconds(self, plan: Plan) -> Seconds:
        """The seconds that a simulation is expected to find at least; additive ones if none did."""
        part = self._least.get(_group(plan), 0.0)
        return Seconds(plan.step_seconds + _EXPECTED * part * _sent_seconds(plan))


def _group(plan: Plan) -> Hashable:
    return plan.fingerprint, plan.mesh.shape, plan.micro_batches, plan.stages


def _sent_seconds(plan: Plan) -> float:
    """Seconds of all messages of parameters and of their gradients."""
    weights = {one.name for one in plan.parameters}
    return sum(one.seconds for one in plan.transfers if one.value in weights)
