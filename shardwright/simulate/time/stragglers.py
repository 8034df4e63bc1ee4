"""Straggler time: the expected wait for the slowest rank, without the transfer itself.

Ranks with equal work arrive at collectives at different times, and all wait for the last (Faraj,
Patarasu and Yuan, "A study of process arrival patterns for MPI collective operations", 2008). The
wait grows with the time since the last synchronization: with its square root if disturbances are
short and independent, almost linearly if one rank is slower for a longer time
(`Machine.arrival_skew_power`).

Additive cost tables do not know the time between the waits of a plan. They charge each wait the
marginal cost of one more wait, at an interval that is typical of the model. The simulation of a
step program uses the actual times (`step_program.py`).
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
        OperatorClass.CHUNKED_LOSS,
        OperatorClass.CHUNKED_MLP,
    }
)


def stretch(graph: Graph, analysis: Analysis, machine: Machine) -> Seconds:
    """The mean seconds of a contraction's pass on one device, with other operators in between.

    Forward and backward are one pass each. A plan that splits operators waits about once in a pass.
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
    """`machine`, with straggler time added to the launch of every collective.

    n waits in time t cost n (t / n)^power, so the marginal cost of one more is 1 - power times that
    of each. The whole cost is added instead where plans are compared by additive seconds: with
    `whole`, as for pipelines, and on machines whose plans are not simulated (`Machine.settles`).

    Args:
        machine: returned unchanged if it has no straggler time, or already has it added.
        between: the seconds between waits on one device (`stretch`); called only if needed.
        parts: the number by which `between` is divided, for devices and micro-batches.
        whole: whether the whole cost is added.
    """
    if not machine.arrival_skew_seconds or machine.charged_skew_seconds:
        return machine
    part = 1.0 if whole or not machine.settles else 1 - machine.arrival_skew_power
    charged = Seconds(part * late(machine, between() / parts))
    launch = Seconds(machine.collective_launch_seconds + charged)
    return replace(machine, collective_launch_seconds=launch, charged_skew_seconds=charged)


def late(machine: Machine, seconds: float) -> float:
    """The mean wait, in seconds, for the last rank after all have computed for `seconds`."""
    grown = (seconds / SKEWED_SECONDS) ** machine.arrival_skew_power
    return machine.arrival_skew_seconds * float(grown)


def at_a_wait(machine: Machine, since: float, slack: float) -> tuple[float, float]:
    """The straggler time at a wait, and the skew of the ranks after it, both in seconds.

    The skew is given as the seconds of computation that would cause it.

    Args:
        machine: has the figures of arrival skew.
        since: seconds of computation since ranks were synchronized.
        slack: of these, seconds since the collective was started; they hide a part of the wait.
    """
    spread = late(machine, max(0.0, since - slack))
    if not spread:
        return 0.0, since
    lost = spread * exp(-slack / (2 * spread))
    return lost, slack + _after(machine, spread - lost)


def _after(machine: Machine, spread: float) -> float:
    """Seconds of computation after which the mean wait is `spread`, the inverse of `late`."""
    grown = spread / machine.arrival_skew_seconds
    return SKEWED_SECONDS * float(grown ** (1 / machine.arrival_skew_power))
