"""Plans with so many buckets of parameters in flight that more hardly make them faster."""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.plan import Plan

_AHEAD = 8  # buckets in flight with which the time of a plan is about its least


def far_ahead(plan: Plan, other: Plan | None = None) -> Plan:
    """`plan` with that many buckets in flight, or as many as `other`; but for stages."""
    ahead = _AHEAD if other is None else max(other.ahead, _AHEAD)
    if ahead <= plan.ahead or plan.stages > 1 or (other is not None and other.stages > 1):
        return plan
    return replace(plan, ahead=ahead)
