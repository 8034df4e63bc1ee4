"""Bytes communicated, by SoyBean's measure: data parallel, model parallel, k-cut and joint.

    python -m benchmarks.soybean_cuts.run -o benchmarks/soybean_cuts/result.json

Models are built on the meta device: nothing is downloaded or allocated. Data parallel splits the
batch of whatever has one and has a copy of all parameters everywhere, model parallel splits the
output features of every layer and is free in all else, k-cut and joint are free in everything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pytorchcv.model_provider import get_model
from torch import Tensor, nn

import shardwright as sw
from benchmarks import record
from shardwright.ir.graph import Graph, LeafKind, Op
from shardwright.ir.layout import Mesh
from shardwright.planner.kcut.cutter import Cuts, Cutter, Legal
from shardwright.rules.analysis import analyze
from shardwright.rules.rule import Choice, Rule, Split

SEED = 0
MACHINE = "8x8xH100"  # breaks ties by memory, and is not in the measure otherwise
CUTS = range(1, 7)  # 2 to 64 devices
AT_ONCE = 4  # cuts that the joint search makes at once; more would take minutes


class Trained(nn.Module):
    """A network and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.network(inputs), classes)


def convolutional(name: str, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network of pytorchcv on images of 224 x 224."""
    images = torch.zeros(batch, 3, 224, 224)
    return Trained(get_model(name)), (images, torch.zeros(batch, dtype=torch.long))


def wide_mlp(batch: int, width: int, layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Linear layers of one width with ReLUs between them."""
    body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    inputs = torch.zeros(batch, width)
    return Trained(nn.Sequential(*body[:-1])), (inputs, torch.zeros(batch, dtype=torch.long))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "AlexNet, batch 128": lambda: convolutional("alexnet", 128),
    "VGG-16, batch 64": lambda: convolutional("vgg16", 64),
    "MLP of 4 x 8192, batch 512": lambda: wide_mlp(512, 8192, 4),
}


def data_parallel(graph: Graph) -> Legal:
    """Splits of the batch, which is the first dimension of every input."""
    dims = analyze(graph).dims
    batch = {dims[leaf.name][0][0] for leaf in graph.leaves_of(LeafKind.INPUT)}

    def legal(op: Op, rule: Rule, choice: Choice) -> bool:
        return isinstance(choice, Split) and rule.factor[choice.factor].atom in batch

    return legal


def model_parallel(op: Op, rule: Rule, choice: Choice) -> bool:
    """Splits of what only weight and result have; of operators without weights any split."""
    if not isinstance(choice, Split):
        return False
    if not rule.work:
        return True
    of_input, of_weight, of_result = (
        {name for dim in dims for name in dim} for dims in (*rule.operands[:2], rule.results[0])
    )
    return choice.factor in (of_weight & of_result) - of_input


def measure(model: nn.Module, args: tuple[Tensor, ...]) -> list[dict[str, Any]]:
    """A row for each number of devices."""
    graph, machine = sw.capture(model, args), sw.Machine.preset(MACHINE)
    free, by_columns = Cutter(graph, machine), Cutter(graph, machine, legal=model_parallel)
    by_batch = Cutter(graph, machine, legal=data_parallel(graph))
    weights = sum(graph.tensor[leaf.name].bytes for leaf in graph.leaves_of(LeafKind.PARAMETER))
    rows = []
    for count in CUTS:
        mesh = Mesh(tuple((f"k{i}", 2) for i in range(1, count + 1)))
        copies = {leaf.name: (0,) * count for leaf in graph.leaves_of(LeafKind.PARAMETER)}
        row: dict[str, Any] = {
            "devices": mesh.size,
            "2 (n - 1) |W|, bytes": 2 * (mesh.size - 1) * weights,
            "data parallel, bytes": by_batch.crossing(replace(by_batch.cut(mesh), storage=copies)),
            "model parallel, bytes": by_columns.cut(mesh).bytes,
        }
        for name, at_once in (("k-cut", 1), ("joint", min(count, AT_ONCE))):
            start = time.process_time()
            cuts = free.cut(mesh, at_once)
            row[f"{name}, bytes"] = cuts.bytes
            row[f"{name}, processor seconds"] = round(time.process_time() - start, 3)
            row[f"{name}, splits"] = _splits(free, cuts)
        row["cuts made at once by joint"] = min(count, AT_ONCE)
        rows.append(row)
    return rows


def _splits(cutter: Cutter, cuts: Cuts) -> dict[str, str]:
    """What is split of every layer that has weights, a word for each cut."""
    rules = cutter.analysis.rules
    return {
        op.source.module: " ".join(str(rules[op.name].choices()[k]) for k in cuts.tilings[op.name])
        for op in cutter.graph.ops
        if rules[op.name].work
    }


def main() -> None:
    """Measure every model, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    given = parser.parse_args()
    found = {}
    for name in given.models:
        with torch.device("meta"):
            model, args = MODELS[name]()
        found[name] = measure(model, args)
        print(f"{name}, GB in all devices a step", flush=True)
        kinds = ("data parallel", "model parallel", "k-cut", "joint")
        print("devices", *(f"{kind:>14}" for kind in kinds))
        for row in found[name]:
            print(f"{row['devices']:7}", *(f"{row[f'{k}, bytes'] / 1e9:14.3f}" for k in kinds))
    record.write({"machine that breaks ties": MACHINE, "models": found}, given.output, SEED)


if __name__ == "__main__":
    main()
