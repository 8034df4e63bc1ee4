"""Two hundred steps on ranks and in the simulation, compared bit for bit in float64.

    python -m benchmarks.spectrain_equality.run                       # some minutes, two idle cores
    python -m benchmarks.spectrain_equality.run --steps 5 --stages 2  # nothing written

Every stage is a process of its own, over gloo. What is compared: each loss, the loss of an
evaluation after the drain, and every parameter and buffer. Each rank writes down how many of its
numbers differ and by how much at most. With `--shared` two ranks share each stage, its operators
split somehow: sums are made in another order there, and numbers agree but for rounding.

Ranks that do not end within `--minutes` are ended. What is done of a whole run is kept beside the
result, in result.rows; started again, it goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import record
from benchmarks.spectrain_accuracy.subjects import LENGTH, VOCABULARY, Batch, Transformer
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import AXIS
from shardwright.ir.schedules.weight_versions import weights_named
from shardwright.program.decisions import everything_whole
from shardwright.rules.placements import tilings
from shardwright.runtime.async_pipeline.runner import AsyncPipeline
from shardwright.runtime.async_pipeline.simulation import AsyncSimulation
from shardwright.runtime.pipeline.stage import Stages, capture_stages
from tests.harness.ranks import run_ranks

HERE = Path(__file__).parent
STAGES, STEPS = (2, 4), 200
WEIGHTS = ("stale", "stash", "spectrain")
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
CPU = torch.device("cpu")


class Case(NamedTuple):
    """One comparison."""

    stages: int
    ranks_per_stage: int
    optimizer: str
    weights: str


def subject_of(steps: int) -> tuple[nn.Module, list[Batch]]:
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


def on_rank(
    stages: Stages, steps: int, optimizer: str, how: str, per_stage: int
) -> dict[str, torch.Tensor]:
    """Losses of this rank, that of an evaluation and the weights, once all is drained."""
    model, batches = subject_of(steps)
    device_mesh = None
    if per_stage > 1:
        shape = (len(stages.parts), per_stage)
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=(AXIS, "dp"))
    pipeline = AsyncPipeline(stages, model, weights_named(how), device=CPU, device_mesh=device_mesh)
    steps_of = OPTIMIZERS[optimizer](pipeline.parameters())
    losses = [pipeline.train_step(steps_of, batch) for batch in batches]
    losses = [loss for loss in losses if not loss.isnan()] + pipeline.drain(steps_of)
    values = {"losses": torch.stack(losses), "evaluation": pipeline.evaluate(batches[0])}
    return values | {key: _whole(value) for key, value in pipeline.named_parameters()}


def simulated(
    stages: Stages, model: nn.Module, batches: list[Batch], optimizer: str, how: str
) -> dict[str, torch.Tensor]:
    """The same of all stages in this process."""
    simulation = AsyncSimulation(stages, model, how, OPTIMIZERS[optimizer])
    losses = torch.stack([simulation.train_step(batch) for batch in batches])
    simulation.drain()
    found = {"losses": losses, "evaluation": simulation.evaluate(batches[0])}
    return simulation.state_dict() | found


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


def measure(
    stages: Stages, subject: tuple[nn.Module, list[Batch]], case: Case, limit_seconds: float
) -> dict[str, Any]:
    """One combination, on all ranks and in the simulation."""
    truth = simulated(stages, *subject, case.optimizer, case.weights)
    given = stages if case.ranks_per_stage == 1 else shared(stages)
    every = run_ranks(
        case.stages * case.ranks_per_stage,
        on_rank,
        given,
        len(subject[1]),
        case.optimizer,
        case.weights,
        case.ranks_per_stage,
        timeout=limit_seconds,
    )
    told = [_difference(values, truth) for values in every]
    return {
        **case._asdict(),
        "compared": sum(row["compared"] for row in told),
        "different": sum(row["different"] for row in told),
        "most": max(row["most"] for row in told),
        "last_loss": told[0]["last_loss"],
    }


def main() -> None:
    """Compare, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES))
    parser.add_argument("--shared", action="store_true", help="two ranks to each stage")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the ranks of one case")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    name = "result_shared" if options.shared else "result"
    whole = options.steps == STEPS and options.stages == list(STAGES)
    kept = HERE / f"{name}.rows" if whole else None
    found = _read(kept)
    for count in options.stages:
        subject = subject_of(options.steps)
        stages = capture_stages(subject[0], subject[1][0], stages=count)
        for optimizer, how in product(OPTIMIZERS, WEIGHTS):
            case = Case(count, 2 if options.shared else 1, optimizer, how)
            if case not in found:
                found[case] = measure(stages, subject, case, 60 * options.minutes)
                print(_line(found[case]), flush=True)
                if kept is not None:
                    with kept.open("a") as file:
                        file.write(json.dumps(found[case]) + "\n")
    if kept is not None:
        claim = "asynchronous ranks equal the simulation bit for bit in float64"
        if options.shared:
            claim = "shared asynchronous stages equal the simulation but for the order of sums"
        result = {"claim": claim, "steps": options.steps, "rows": list(found.values())}
        record.write(result, HERE / f"{name}.json", 0)
        kept.unlink()


def _read(rows: Path | None) -> dict[Case, dict[str, Any]]:
    lines = rows.read_text().splitlines() if rows is not None and rows.exists() else []
    every = [json.loads(line) for line in lines]
    return {Case(*(row[name] for name in Case._fields)): row for row in every}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['stages']} stages x {row['ranks_per_stage']}  {row['optimizer']:8}"
        f" {row['weights']:9}  {row['different']} of {row['compared']} numbers differ,"
        f" by {row['most']:.1e} at most"
    )


if __name__ == "__main__":
    main()
