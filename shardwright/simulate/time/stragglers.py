"""Straggler time: the expected wait for the slowest rank, without the transfer itself.

Ranks with equal work arrive at collectives at different times, and all wait for the last (Faraj,
Patarasu and Yuan, "A study of process arrival patterns for MPI collective operations", 2008). The
delay grows with the time since the last synchronisation: with its square root if disturbances are
short and independent, almost linearly if one rank is slower for a longer time (`Machine`).

Additive tables do not know the time between the waits of a plan. They charge each wait the marginal
cost of one more wait at the interval that is usual for the model. The simulation of a step program
uses the actual times (`step_program.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp

import numpy as np

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.machine.calls import by_target
from shardwright.machine.model import SKEWED_SECONDS, Machine
from shardwright.rules.analysis import Analysis
from shardwright.simulate.costs.compute import operator_seconds
from shardwright.simulate.costs.workload import OperatorClass, workload

_CONTRACTIONS = frozenset(
    {
        OperatorClass.MATMUL,
        OperatorClass.CONVOLUTION,
        OperatorClass.ATTENTION,
        OperatorClass.EXPERTS,
    }
)


def stretch(graph: Graph, analysis: Analysis, machine: Machine) -> Seconds:
    """The mean seconds on one device between passes of contractions.

    A plan that splits operators waits about this often. Forward and backward count as one pass
    each.
    """
    known = by_target(machine.device.timings)
    seconds, passes = 0.0, 0
    of_shape: dict[object, float] = {}
    for op in graph.ops:
        work = workload(op, analysis.rules[op.name], graph, known, machine.expert_skew)
        if work not in of_shape:
            sizes = np.array(work.sizes, np.int64)[:, None]
            of_shape[work] = float(operator_seconds(work, sizes, machine.device)[0])
        seconds += of_shape[work]
        passes += (work.kind in _CONTRACTIONS) * (1 + work.has_backward)
    return Seconds(seconds / max(1, passes))


def skewed(
    machine: Machine, between: Callable[[], Seconds], parts: int, *, whole: bool = False
) -> Machine:
    """`machine`, with a part of the straggler time added to every launch.

    That is a part of `between`, which is asked for only where ranks are apart at all. n waits in
    time t cost n (t / n)^power, so that one more costs 1 - power of what each does; or the `whole`
    of it, where additive seconds are compared: in pipelines, and on machines that settle nothing.
    """
    if not machine.arrival_skew_seconds or machine.charged_skew_seconds:
        return machine
    part = 1.0 if whole or not machine.settles else 1 - machine.arrival_skew_power
    charged = Seconds(part * late(machine, between() / parts))
    launch = Seconds(machine.collective_launch_seconds + charged)
    return replace(machine, collective_launch_seconds=launch, charged_skew_seconds=charged)


def late(machine: Machine, seconds: float) -> float:
    """The mean wait for the last rank when all have computed for `seconds`, in seconds."""
    grown = (seconds / SKEWED_SECONDS) ** machine.arrival_skew_power
    return machine.arrival_skew_seconds * float(grown)


def at_a_wait(machine: Machine, since: float, slack: float) -> tuple[float, float]:
    """The straggler time at a wait, and the seconds of computing after which ranks are that late.

    Args:
        machine: its figures say how late ranks are.
        since: seconds of computing since ranks were together.
        slack: of these, seconds since what is waited for was started.
    """
    spread = late(machine, max(0.0, since - slack))
    if not spread:
        return 0.0, since
    lost = spread * exp(-slack / (2 * spread))
    return lost, slack + _after(machine, spread - lost)


def _after(machine: Machine, spread: float) -> float:
    """Seconds after which ranks are so far `spread`, the inverse of `late`."""
    grown = spread / machine.arrival_skew_seconds
    return SKEWED_SECONDS * float(grown ** (1 / machine.arrival_skew_power))
