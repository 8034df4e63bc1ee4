"""Capture time by depth: a model of 128 layers takes at most four times as long as one of 32.

    python -m benchmarks.capture.run

Models are built on the meta device: nothing is downloaded or allocated. The
depths take turns, after a capture that nobody times, so that imports, caches
and noise hit all alike; the smallest processor time of each is what counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright as sw
from benchmarks import record

SEED = 0
DEPTHS = (32, 128)
TARGET = 4.0  # times as long at the greater depth as at the smaller


def llama(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Llama-3-8B's shape, sequence 2048."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    ids = torch.zeros((8, 2048), dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def gpt2(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2's shape, with dropout."""
    ids = torch.zeros((8, 1024), dtype=torch.long)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers)), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": llama,
    "gpt2": gpt2,
}


def measure(make: Callable[[int], tuple[nn.Module, dict[str, Any]]], repeats: int) -> Any:
    """Processor seconds of each depth, and how many times longer the greater one takes."""
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    operators = {}
    _timed(make, 1)
    for _ in range(repeats):
        for depth in DEPTHS:
            took, operators[depth] = _timed(make, depth)
            seconds[depth].append(round(took, 3))
    small, large = (min(seconds[depth]) for depth in DEPTHS)
    return {
        "operators": operators,
        "processor_seconds": seconds,
        "ratio": round(large / small, 3),
    }


def _timed(
    make: Callable[[int], tuple[nn.Module, dict[str, Any]]], layers: int
) -> tuple[float, int]:
    with torch.device("meta"):
        model, batch = make(layers)
    start = time.process_time()
    graph = sw.capture(model, (), batch)
    return time.process_time() - start, len(graph.ops)


def main() -> None:
    """Measure all models, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in options.models:
        found[name] = measure(MODELS[name], options.repeats)
        print(f"{name}: {found[name]}", flush=True)
    claim = f"{DEPTHS[1]} layers take at most {TARGET:g} times as long as {DEPTHS[0]}"
    record.write({"claim": claim, "target": TARGET, "models": found}, options.out, SEED)


if __name__ == "__main__":
    main()
