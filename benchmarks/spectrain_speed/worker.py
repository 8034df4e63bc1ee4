"""What runs on every host: two ways to train one model take turns, and rank 0 prints the times."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.spectrain_speed.models import made
from shardwright.ir.pipeline import AXIS
from shardwright.ir.schedules.weight_versions import weights_named
from shardwright.program.decisions import everything_whole
from shardwright.runtime.async_pipeline.runner import AsyncPipeline
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel import build
from shardwright.runtime.pipeline.stage import Stages, capture_stages

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """`train` makes so many steps; what is under way between them `fill` begins, `drain` ends."""

    train: Callable[[int], None]
    fill: Callable[[], None] = lambda: None
    drain: Callable[[], None] = lambda: None


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def data_parallel(model: nn.Module, batch: Batch) -> Way:
    """`DistributedDataParallel`, each host a part of the batch."""
    module = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
    optimizer = optimizer_of(module.parameters())
    mine = [part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in batch]

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            module(*mine).backward()
            optimizer.step()

    return Way(train)


def asynchronous(stages: Stages, model: nn.Module, batch: Batch) -> Way:
    """SpecTrain. Once it is full, a step is one forward and one backward pass on every stage."""
    pipeline = AsyncPipeline(stages, model, weights_named("spectrain"), device=CPU)
    optimizer = optimizer_of(pipeline.parameters())

    def train(steps: int) -> None:
        for _ in range(steps):
            pipeline.train_step(optimizer, batch)

    def drain() -> None:
        pipeline.drain(optimizer)

    return Way(train, lambda: train(len(stages.parts) - 1), drain)


def flushing(stages: Stages, model: nn.Module, batch: Batch) -> Way:
    """1F1B with the same cuts, in as many micro-batches as stages."""
    count, graph = len(stages.parts), stages.captured.graph
    pipeline = replace(stages.staged.pipeline, schedule="1F1B")
    decisions = replace(everything_whole(graph), micro_batches=count, pipeline=pipeline)
    module = build(
        stages.captured,
        stages.analysis,
        decisions,
        ModuleOptions(dict(model.named_parameters()), {}),
        init_device_mesh("cpu", (count, 1), mesh_dim_names=(AXIS, "dp")),
    )
    optimizer = optimizer_of(module.parameters())

    def train(steps: int) -> None:
        for _ in range(steps):
            module.train_step(optimizer, batch)

    return Way(train)


def timed(way: Way, steps: int) -> float:
    """Seconds of `steps` steps in the middle of a run, until the last host is done."""
    way.fill()
    dist.barrier()
    start = time.perf_counter()
    way.train(steps)
    dist.barrier()
    seconds = time.perf_counter() - start
    way.drain()
    return seconds


def main() -> None:
    """Print, on rank 0, one line of JSON: per round and way, seconds of a step."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", choices=("vgg16", "transformer"), required=True)
    parser.add_argument("--against", choices=("ddp", "1f1b"), required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of the other way, in a round")
    parser.add_argument("--pipeline-steps", type=int, default=16)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model, batch = made(options.model, options.batch)
    stages = capture_stages(model, batch, stages=dist.get_world_size())
    ways: dict[str, tuple[Way, int]] = {
        "async": (asynchronous(stages, model, batch), options.pipeline_steps)
    }
    if options.against == "ddp":
        ways["ddp"] = data_parallel(model, batch), options.steps
    else:
        ways["1f1b"] = flushing(stages, model, batch), options.steps
    for way, _ in ways.values():
        timed(way, 1)  # makes connections and the optimizer's state
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, (way, steps) in ways.items():
            found[name].append(timed(way, steps) / steps)
    if dist.get_rank() == 0:
        sizes = sum(p.numel() * p.element_size() for p in model.parameters())
        print(json.dumps({"seconds": found, "parameter_bytes": sizes}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
