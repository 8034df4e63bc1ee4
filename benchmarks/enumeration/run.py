"""Uniform strategies of Llama-70B for 8 to 4,096 devices: seconds, and a sample of what is pruned.

    python -m benchmarks.enumeration.run -o benchmarks/enumeration/result.json

The batch has four sequences a device. Seconds are those of `enumerated` and `priced`, without the
capture of the model and without programs of the plans that are shown. Of the strategies that bounds
rule out, `--sample` are priced: `bound` is the largest of their bounds over their times, `memory`
of their bytes, and `better` counts those that would have been faster by more than a strategy's
resolution within the memory of a device. Bounds hold where the first two are at most 1.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from benchmarks import record
from shardwright.ir.graph import Graph
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.machine.presets import preset
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier.bounds import Bounds
from shardwright.planner.strategies.frontier.enumeration import strategies_on
from shardwright.planner.strategies.frontier.priced_frontier import RESOLUTION, limited, priced

TOKENS, EACH = 4096, 4  # of a sequence; sequences of a device
LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def main() -> None:
    """Enumerate, price a sample of what was pruned, and write that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="8,64,512,4096")
    parser.add_argument("--sample", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for devices in map(int, asked.devices.split(",")):
        rows.append(row(devices, asked.sample, random.Random(asked.seed)))
        print(rows[-1], flush=True)
    if asked.out is not None:
        record.write({"rows": rows}, asked.out, asked.seed)


def row(devices: int, sample: int, draw: random.Random) -> dict[str, Any]:
    """The strategies of one number of devices."""
    graph = captured(devices * EACH)
    machine = preset(f"{max(1, devices // 8)}x8xH100")
    wall, busy = time.perf_counter(), time.process_time()
    expansion = Expansion(graph, machine, "adamw")
    every = list(strategies_on(machine, limited(expansion, tp_across_hosts=False)))
    found = priced(expansion, every)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    limit = machine.device.usable_bytes
    best = min((one.point.time for one in found if one.peak <= limit), default=float("inf"))
    known = {one.name for one in found}
    pruned = [one for one in every if str(one) not in known]
    return {
        "devices": devices,
        "strategies": len(every),
        "priced": len(found),
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(busy, 2),
        **pruned_sample(expansion, draw.sample(pruned, min(sample, len(pruned))), best),
    }


def pruned_sample(expansion: Expansion, sample: list[Any], best: float) -> dict[str, Any]:
    """The largest bounds over prices of some strategies, and how many would have been the best."""
    bounds, limit = Bounds(expansion), expansion.machine.device.usable_bytes
    bound = memory = 0.0
    better = tried = 0
    for strategy in sample:
        try:
            seconds, peak = expansion.expanded(strategy).cost
        except StrategyError:  # no pipeline of so many stages
            continue
        tried += 1
        bound = max(bound, bounds.seconds(strategy) / seconds)
        memory = max(memory, bounds.bytes(strategy) / peak)
        better += peak <= limit and seconds * (1 + RESOLUTION) < best
    return {"sample": tried, "bound": bound, "memory": memory, "better": better}


def captured(batch: int) -> Graph:
    """A step of Llama-70B on a batch."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_70B, max_position_embeddings=TOKENS))
        ids = torch.zeros((batch, TOKENS), dtype=torch.long)
    graph: Graph = sw.capture(model, (), {"input_ids": ids, "labels": ids}, precision="bf16")
    return graph


if __name__ == "__main__":
    main()
