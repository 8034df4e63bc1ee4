"""Model FLOPs utilisation (MFU): useful operations of a step over what devices could compute."""

from __future__ import annotations

from shardwright.ir.graph import Graph
from shardwright.machine.model import Device
from shardwright.planner.strategies.unpriced import dtypes_of
from shardwright.rules.analysis import Analysis
from shardwright.simulate.costs.useful_flop import useful_flop


def useful_seconds(graph: Graph, analysis: Analysis, device: Device) -> float:
    """Seconds of a step's useful operations at the peak of one device, without recomputation."""
    dtype = dtypes_of(graph)[0] or "float32"
    return useful_flop(graph, analysis) / device.peak_flop_per_s(dtype)
