"""How long ranks wait for the last one, and not for what it sends.

Ranks that do the same take turns at being late, and whoever waits, waits for the last (Faraj,
Patarasu and Yuan, "A study of process arrival patterns for MPI collective operations", 2008).
Lateness adds up from independent disturbances, so it grows with the root of the time between two
waits. A wait costs what is usual for the model: plans differ in how many they have, and tables
that add up cannot know how far apart those of a plan are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shardwright.cost.compute import operator_seconds
from shardwright.cost.workload import OperatorClass, workload
from shardwright.ir.calls import by_target
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.ir.machine import NO_TIME, SKEWED_SECONDS, Machine
from shardwright.rules.analysis import Analysis

_CONTRACTIONS = frozenset(
    {
        OperatorClass.MATMUL,
        OperatorClass.CONVOLUTION,
        OperatorClass.ATTENTION,
        OperatorClass.EXPERTS,
    }
)


def stretch(graph: Graph, analysis: Analysis, machine: Machine) -> Seconds:
    """Seconds from one pass of a contraction to the next on one device, on average.

    About as often a plan that cuts operators waits: forward and backward count as one pass each.
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


def skewed(machine: Machine, between: Callable[[], Seconds], parts: int) -> Machine:
    """`machine`, every collective of which waits for ranks that computed for a part of `between`.

    That is asked for only where ranks are apart at all.
    """
    if not machine.arrival_skew_seconds:
        return machine
    waiting = machine.arrival_skew_seconds * (between() / parts / SKEWED_SECONDS) ** 0.5
    launch = Seconds(machine.collective_launch_seconds + waiting)
    return replace(machine, collective_launch_seconds=launch, arrival_skew_seconds=NO_TIME)
