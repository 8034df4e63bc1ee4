"""Two hundred steps on ranks and in the simulation, compared bit for bit in float64.

    python -m benchmarks.spectrain_equality.run            # some minutes on two idle cores
    python -m benchmarks.spectrain_equality.run --steps 5  # nothing written

Every stage is a process of its own, over gloo. What is compared: each loss, the loss of an
evaluation after the drain, and every parameter and buffer. Each rank writes down how many of its
numbers differ and by how much at most. With `--shared` two ranks share each stage, its operators
split somehow: sums are made in another order there, and numbers agree but for rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import record
from benchmarks.spectrain_accuracy.subjects import LENGTH, VOCABULARY, Batch, Transformer
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import AXIS
from shardwright.lower.decisions import everything_whole
from shardwright.rules.placing import tilings
from shardwright.runtime.async_pipeline import AsyncPipeline
from shardwright.runtime.async_sim import AsyncSimulation
from shardwright.runtime.stage import Stages, capture_stages
from shardwright.runtime.weights import weights_named

HERE = Path(__file__).parent
STAGES = (2, 4)
WEIGHTS = ("stale", "stash", "spectrain")
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
CPU = torch.device("cpu")


def subject(steps: int) -> tuple[nn.Module, list[Batch]]:
    """A small transformer in float64, and batches for it; alike in every process."""
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (steps, 4, LENGTH + 1))
    batches = [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in text]
    return Transformer(width=32, heads=4, layers=4).double(), batches


def shared(stages: Stages) -> Stages:
    """The same stages, each on two ranks: every operator split that can be."""
    graph, mesh = stages.captured.graph, Mesh((("dp", 2),))
    found = {}
    for op in graph.ops:
        known = {str(tiling): tiling for tiling, _ in tilings(stages.analysis.rules[op.name], mesh)}
        found[op.name] = known[max(known)]
    decisions = replace(
        everything_whole(graph),
        mesh=mesh,
        tilings=found,
        storage={name: Layout.replicated(mesh) for name in stages.staged.decisions.storage},
        pipeline=stages.staged.pipeline,
    )
    return Stages.planned(stages.captured, stages.analysis, decisions)


def on_rank(rank: int, folder: str, count: int, per_stage: int, steps: int) -> None:
    """All combinations on one rank; what differs from the simulation is written to `folder`."""
    torch.set_num_threads(1)
    world = count * per_stage
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    model, batches = subject(steps)
    alone = capture_stages(model, batches[0], stages=count)
    stages, device_mesh = alone, None
    if per_stage > 1:
        stages = shared(alone)
        device_mesh = init_device_mesh("cpu", (count, per_stage), mesh_dim_names=(AXIS, "dp"))
    rows = []
    for name, optimizer in OPTIMIZERS.items():
        for how in WEIGHTS:
            pipeline = AsyncPipeline(
                stages, model, weights_named(how), device=CPU, device_mesh=device_mesh
            )
            steps_of = optimizer(pipeline.parameters())
            losses = [pipeline.train_step(steps_of, batch) for batch in batches]
            losses = [loss for loss in losses if not loss.isnan()] + pipeline.drain(steps_of)
            values = {"losses": torch.stack(losses), "evaluation": pipeline.evaluate(batches[0])}
            values |= {key: _whole(value) for key, value in pipeline.named_parameters()}
            truth = torch.load(Path(folder) / f"{name} {how}")
            rows.append({"optimizer": name, "weights": how, **_difference(values, truth)})
    (Path(folder) / f"rank{rank}").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def simulate(folder: str, count: int, steps: int) -> None:
    """Losses and weights of all combinations, as files in `folder`."""
    model, batches = subject(steps)
    stages = capture_stages(model, batches[0], stages=count)
    for name, optimizer in OPTIMIZERS.items():
        for how in WEIGHTS:
            simulation = AsyncSimulation(stages, model, how, optimizer)
            losses = torch.stack([simulation.train_step(batch) for batch in batches])
            simulation.drain()
            found = {"losses": losses, "evaluation": simulation.evaluate(batches[0])}
            torch.save({**simulation.state_dict(), **found}, Path(folder) / f"{name} {how}")


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    found = parameter.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def _difference(
    values: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> dict[str, float]:
    """How many numbers were compared, how many differ, and by how much at most."""
    pairs = [(value, truth[key].view_as(value)) for key, value in values.items()]
    return {
        "compared": sum(a.numel() for a, _ in pairs),
        "different": sum(int((a != b).sum()) for a, b in pairs),
        "most": max(float((a - b).abs().max()) for a, b in pairs),
        "last_loss": float(values["losses"][-1]),
    }


def measure(count: int, per_stage: int, steps: int) -> list[dict[str, Any]]:
    """All combinations for one number of stages, all ranks together."""
    with tempfile.TemporaryDirectory() as folder:
        simulate(folder, count, steps)
        mp.spawn(on_rank, (folder, count, per_stage, steps), nprocs=count * per_stage)
        files = [Path(folder) / f"rank{rank}" for rank in range(count * per_stage)]
        told = [json.loads(file.read_text()) for file in files]
    return [
        {
            "stages": count,
            "ranks_per_stage": per_stage,
            **rows[0],
            "compared": sum(row["compared"] for row in rows),
            "different": sum(row["different"] for row in rows),
            "most": max(row["most"] for row in rows),
        }
        for rows in zip(*told, strict=True)
    ]


def main() -> None:
    """Compare, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--shared", action="store_true", help="two ranks to each stage")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rows = []
    for count in options.stages:
        for row in measure(count, 2 if options.shared else 1, options.steps):
            rows.append(row)
            print(
                f"{row['stages']} stages x {row['ranks_per_stage']}  {row['optimizer']:8}"
                f" {row['weights']:9}  {row['different']} of {row['compared']} numbers differ,"
                f" by {row['most']:.1e} at most",
                flush=True,
            )
    if options.steps >= 200 and tuple(options.stages) == STAGES:
        claim = "asynchronous ranks equal the simulation bit for bit in float64"
        if options.shared:
            claim = "shared asynchronous stages equal the simulation but for the order of sums"
        name = "result_shared.json" if options.shared else "result.json"
        record.write({"claim": claim, "steps": options.steps, "rows": rows}, HERE / name, 0)


if __name__ == "__main__":
    main()
