"""Checks a memory limit against what all plans need, before the search."""

from __future__ import annotations

from shardwright.ir.frontier import InfeasibleError, format_bytes
from shardwright.ir.layout import Bytes
from shardwright.machine.model import Machine

WEIGHTS = "weights"
STATE = "weights, gradients and optimizer state"


def limit_on(machine: Machine, memory_limit: int | str | None) -> int | None:
    """The memory limit in bytes, by default that of a device of `machine`; None is no limit."""
    if memory_limit is None:
        return machine.device.usable_bytes
    return None if isinstance(memory_limit, str) else memory_limit


def check_limit(machine: Machine, memory_limit: int | str | None, needed: int, what: str) -> None:
    """Raise `InfeasibleError` where the devices together cannot hold `needed` bytes of `what`.

    At least one rank holds an even share or more. `memory_limit` is as in `Frontier.fastest`.
    """
    limit = limit_on(machine, memory_limit)
    least = -(-needed // machine.devices)
    if limit is not None and least > limit:
        devices = f"{machine.devices} device{'s' * (machine.devices > 1)}"
        raise InfeasibleError(
            f"{what} alone need {format_bytes(least)} on each of {devices} of {machine}, the limit"
            f" is {format_bytes(limit)}: raise the limit or take more devices",
            Bytes(least),
        )
