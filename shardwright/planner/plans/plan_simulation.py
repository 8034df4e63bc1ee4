"""The questions of a frontier about the steps of its plans."""

from __future__ import annotations

from typing import Protocol

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan


class PlanSimulation(Protocol):
    """Simulates steps of plans; each question takes longer than those behind it."""

    def settled(self, plan: Plan) -> Plan:
        """The plan with the time and memory of its whole step, as it is shown to users."""

    def compared(self, plan: Plan) -> Plan:
        """The plan with the same two figures alone."""

    def deepened(self, plan: Plan, limit: Bytes | None) -> Plan:
        """A compared plan that gathers more parameters ahead, where it is faster within `limit`."""

    def peak(self, plan: Plan) -> Bytes:
        """The peak memory that `compared` finds."""

    def reserved(self, plan: Plan) -> Bytes:
        """Bytes of tensors and fragments that the allocator of torch reserves."""

    def seconds(self, plan: Plan) -> Seconds:
        """The step time that `compared` finds."""

    def least_seconds(self, plan: Plan) -> Seconds:
        """A lower bound of the step time, which is not simulated."""
