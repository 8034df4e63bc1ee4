"""Capture and search times on 64 devices, by model, by depth and over all meshes.

    python -m benchmarks.search.run -o benchmarks/search/result.json

Models are built on the meta device: nothing is downloaded or allocated. A
search is repeated and the median reported, in wall and in processor seconds
(on a shared machine the second is the one to compare).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import shardwright as sw
from benchmarks import record
from shardwright.ir.layout import Mesh

SEED = 0
MACHINE = "8x8xH100"
MESH = Mesh.parse("dp=8 tp=8")
BATCH = 128  # two for each device


def llama(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Llama-3-8B's shape, sequence 2048."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    ids = torch.zeros((BATCH, 2048), dtype=torch.long)
    return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    """BERT-large's shape, sequence 512."""
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    ids = torch.zeros((BATCH, 512), dtype=torch.long)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama-8b, 32 layers": lambda: llama(32),
    "llama-8b, 4 layers": lambda: llama(4),
    "llama-8b, 128 layers": lambda: llama(128),
    "bert-large": bert,
}


def measure(make: Callable[[], tuple[nn.Module, dict[str, Any]]], repeats: int) -> dict[str, Any]:
    """Times of one model, and what its frontier looks like."""
    with torch.device("meta"):
        model, batch = make()
    start = time.perf_counter()
    graph = sw.capture(model, (), batch)
    captured = time.perf_counter() - start
    machine = sw.Machine.preset(MACHINE)
    one = [_timed(lambda: sw.search(graph, machine, meshes=[MESH])) for _ in range(repeats)]
    every = [_timed(lambda: sw.search(graph, machine)) for _ in range(max(1, repeats // 2))]
    frontier = sw.search(graph, machine, meshes=[MESH])
    fastest = frontier[0]
    return {
        "operators": len(graph.ops),
        "capture_seconds": round(captured, 3),
        f"search {MESH}": _median(one),
        "search of every mesh of one and two axes": _median(every),
        "plans": len(frontier),
        "fastest_over_bound": fastest.step_seconds / fastest.lower_bound_seconds - 1,
        "fastest_over_best_baseline": fastest.step_seconds
        / min(plan.step_seconds for plan in frontier.baselines),
    }


def _timed(search: Callable[[], object]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    search()
    return time.perf_counter() - wall, time.process_time() - processor


def _median(times: list[tuple[float, float]]) -> dict[str, float]:
    wall, processor = zip(*times, strict=True)
    return {
        "wall_seconds": round(statistics.median(wall), 3),
        "processor_seconds": round(statistics.median(processor), 3),
    }


def main() -> None:
    """Measure every model and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(SEED)
    found = {}
    for name in given.models:
        found[name] = measure(MODELS[name], given.repeats)
        print(f"{name}: {found[name]}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    record.write(
        {"machine planned for": MACHINE, "models": found, "peak_resident_gib": round(peak, 2)},
        given.output,
        SEED,
    )


if __name__ == "__main__":
    main()
