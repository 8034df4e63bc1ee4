"""The program of every rank of `verify`; torchrun starts it with the payload's folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright.plan_io.graph_text import graph_from_json
from shardwright.plan_io.plan_text import plan_from_json
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.runtime.comm.shutdown import leave
from shardwright.runtime.verify.module_comparison import measure, merged
from shardwright.runtime.verify.module_pickling import unpack
from shardwright.runtime.verify.verify import build, optimizer_of


def main(folder: Path) -> None:
    """Run the plan of the payload in `folder`; rank 0 writes the result there."""
    dist.init_process_group("gloo")
    try:
        payload = torch.load(folder / "payload.pt", weights_only=True)
        payload["opaque"] = unpack((folder / "modules.pkl").read_bytes())
        graph = graph_from_json(payload["graph"])
        # The graph was widened after planning: the same operators under another fingerprint.
        plan = replace(plan_from_json(payload["plan"]), fingerprint=payload["fingerprint"])
        analysis = analyze(graph)
        decisions = read_plan(plan, graph, analysis)
        device_mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
        module = build(
            graph,
            analysis,
            payload,
            decisions,
            device_mesh,
        )
        result = measure(module, optimizer_of(plan.optimizer), payload["batch"])
        if decisions.pipeline is not None:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, result)
            result = merged(every)
        if dist.get_rank() == 0:
            torch.save(result, folder / "result.pt")
        dist.barrier()
    finally:
        leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
