"""Time of a step that a faster host, faster links or an update in one kernel would save."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Graph, Tensor
from shardwright.ir.layout import Seconds
from shardwright.ir.options.mixed_precision import MASTER, master_weights
from shardwright.ir.options.optimizers import fused, optimizer_spec, placed
from shardwright.ir.plan import Plan
from shardwright.machine.model import NO_TIME, Device, Machine
from shardwright.planner.audit.faster_links import FasterLinks, faster_links
from shardwright.planner.recost import operator_seconds
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.operators.chunks import with_chunks
from shardwright.simulate.costs.tile_sizes import local_bytes
from shardwright.simulate.costs.update import update_seconds


class Avoidable(NamedTuple):
    """Seconds of a step, or of all groups of stages together.

    * `host`: of operators, what devices wait for the host to issue kernels; 0 where the host itself
      computes (`Device.issue_seconds`);
    * `update`: what `fused=True` would save; 0 where torch has no such update;
    * `links`: the seconds with faster links; None where they would save little.
    """

    host: Seconds = NO_TIME
    update: Seconds = NO_TIME
    links: FasterLinks | None = None


NOTHING = Avoidable()


def avoidable(plan: Plan, graph: Graph, machine: Machine) -> Avoidable:
    """Seconds of the same decisions with a host that needs no time, and with each other change."""
    device, on_gpu = machine.device, machine.backend_spec.device != "cpu"
    name = fused(plan.optimizer, on_gpu=on_gpu)
    form = with_chunks(graph, plan.numerics.loss_chunks, plan.numerics.mlp_chunks)
    analysis = analyze(form)
    host = _host(plan, form, analysis, machine) if device.issue_seconds else NO_TIME
    links = faster_links(plan, form, analysis, machine)
    if name is None or optimizer_spec(placed(plan.optimizer, plan.offload)).on_host:
        return Avoidable(host, links=links)  # copies of the state take longer than the update
    now, then = (
        _update(plan, form, analysis, device, placed(one, plan.offload))
        for one in (plan.optimizer, name)
    )
    return Avoidable(host, Seconds(now - then), links)


def _host(plan: Plan, graph: Graph, analysis: Analysis, machine: Machine) -> Seconds:
    device = replace(machine.device, issue_seconds=NO_TIME)
    ideal = replace(machine.with_devices(plan.mesh.size), device=device)
    least = operator_seconds(plan, graph, analysis, ideal)
    return Seconds(sum(op.seconds for op in plan.ops) - least)


def _update(plan: Plan, graph: Graph, analysis: Analysis, device: Device, optimizer: str) -> float:
    """Seconds of the update of all parameters, without casts and gathers."""
    masters, total = master_weights(graph), 0.0
    known: dict[tuple[Tensor, int], float] = {}
    for parameter in plan.parameters:
        if parameter.name not in graph.trained:
            continue
        whole = replace(graph.tensor[parameter.name], name="")
        if parameter.name in masters:
            whole = replace(whole, dtype=MASTER)
        atoms, item_bytes = analysis.atoms[parameter.name], ITEM_BYTES[whole.dtype]
        tile = local_bytes(atoms, item_bytes, parameter.layout)
        if (whole, tile) not in known:
            sizes = np.array([tile], np.int64)
            (seconds,) = update_seconds(sizes, optimizer, device, plan.layout_mesh.size, whole)
            known[whole, tile] = float(seconds)
        total += known[whole, tile]
    return total
