"""Runs the payload of `verify` on ranks.

It is also the program of each of them; torchrun starts it with the folder of the payload.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.plan_io.graph_text import graph_from_json
from shardwright.plan_io.plan_text import plan_from_json
from shardwright.program.decisions import Decisions, everything_whole
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import Analysis, analyze
from shardwright.runtime.comm.shutdown import leave
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel import build as module_of
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.parameters.matrix_optimizer import ByShape
from shardwright.runtime.pipeline.runner import PipelineModule
from shardwright.runtime.verify.module_comparison import Measured, Optimizer, measure, merged
from shardwright.runtime.verify.module_pickling import unpack
from shardwright.tracing.graph_builder import Captured


def main(folder: Path) -> None:
    """Join the other ranks, run the plan of the payload in `folder`, and leave."""
    dist.init_process_group("gloo")
    try:
        measure_payload(folder)
        dist.barrier()
    finally:
        leave()


def measure_payload(folder: Path) -> None:
    """Run the plan of the payload in `folder`; rank 0 writes the result there."""
    payload = torch.load(folder / "payload.pt", weights_only=True)
    payload["opaque"] = unpack((folder / "modules.pkl").read_bytes())
    result = measured_on_ranks(payload)
    if dist.get_rank() == 0:
        torch.save(result, folder / "result.pt")


def measured_on_ranks(payload: Mapping[str, Any]) -> Measured:
    """The results of the payload's plan; every rank of the process group calls it."""
    graph = graph_from_json(payload["graph"])
    # The graph was widened after planning: the same operators under another fingerprint.
    plan = replace(plan_from_json(payload["plan"]), fingerprint=payload["fingerprint"])
    analysis = analyze(graph)
    decisions = read_plan(plan, graph, analysis)
    device_mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
    module = build(graph, analysis, payload, decisions, device_mesh)
    result = measure(module, optimizer_of(plan.optimizer), payload["batch"])
    if decisions.pipeline is None:
        return result
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, result)
    return merged(every)


def build(
    graph: Graph,
    analysis: Analysis,
    payload: Mapping[str, Any],
    decisions: Decisions,
    device_mesh: Any,
) -> ParallelModule | PipelineModule:
    """The module of this rank, or of one device without a device mesh, on the CPU."""
    by_every_name = dict(payload["weights"])
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        by_every_name.update((key, payload["weights"][leaf.keys[0]]) for key in leaf.keys)
    return module_of(
        Captured(
            graph,
            dict(payload["constants"]),
            tuple(payload["output_keys"]),
            payload.get("opaque", {}),
        ),
        analysis,
        decisions,
        ModuleOptions(by_every_name, payload["buffers"], seed=1),
        device_mesh,
    )


def one_device(graph: Graph, payload: Mapping[str, Any]) -> ParallelModule:
    """The serial program: every operator whole, nothing communicated."""
    module = build(graph, analyze(graph), payload, everything_whole(graph), None)
    assert isinstance(module, ParallelModule)
    return module


def optimizer_of(name: str) -> Optimizer:
    """The optimizer of that name, to take one step over parameters."""
    spec = optimizer_spec(name)
    others = partial(getattr(torch.optim, spec.torch_class), **spec.options)
    if spec.matrix is None or not spec.matrix.torch_class:
        return others
    matrices = partial(getattr(torch.optim, spec.matrix.torch_class), **spec.matrix.options)
    return partial(ByShape, matrices, others)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
