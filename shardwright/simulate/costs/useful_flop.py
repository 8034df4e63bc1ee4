"""Counts floating point operations of a training step, for model FLOPs utilization (MFU).

Matrix products, convolutions, experts and attention count, forward and backward, as on one device:
causal attention counts half, recomputation nothing (Chowdhery et al., "PaLM", 2022).
"""

from __future__ import annotations

import numpy as np

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.ir.options.mixed_precision import dtypes_of
from shardwright.machine.model import Device
from shardwright.rules.analysis import Analysis
from shardwright.simulate.costs.compute import contraction_flop
from shardwright.simulate.costs.workload import OperatorClass, Workload, workload

_ATTENTION = 2  # products of the forward pass: queries and keys, scores and values


def useful_flop(graph: Graph, analysis: Analysis) -> int:
    """Floating point operations of a step of `graph` on the global batch."""
    work = (workload(op, analysis.rules[op.name], graph) for op in graph.ops)
    return sum(_flop_of(one) for one in work)


def useful_seconds(graph: Graph, analysis: Analysis, device: Device) -> Seconds:
    """Seconds of these operations at the peak of one device, in the dtype of its products."""
    dtype = dtypes_of(graph)[0] or "float32"
    return Seconds(useful_flop(graph, analysis) / device.peak_flop_per_s(dtype))


def _flop_of(work: Workload) -> int:
    """Operations of one operator; a product has one more for each operand with a gradient."""
    once = int(contraction_flop(work, np.array(work.sizes, np.int64)[:, None])[0])
    if work.kind is OperatorClass.ATTENTION:
        return _ATTENTION * once * (3 if work.has_backward else 1)
    if not work.has_backward:
        return once
    if work.kind in (OperatorClass.EXPERTS, OperatorClass.CHUNKED_MLP):
        # Two more for each product, for rows and weights.
        return 3 * once
    return once * (1 + sum(work.operands[i].requires_grad for i in work.contracted))
