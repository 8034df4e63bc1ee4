"""The strategies that publishers chose for four models, beside the best uniform strategies.

    python -m benchmarks.setups.run -o benchmarks/setups/result.json

Captured on the meta device, in bf16 with AdamW, and without fp8. `best` is
the fastest uniform strategy within the memory of a device, of all that `shardwright.strategies`
tries; `alike` the fastest with the publisher's degrees, under any number of micro-batches, any
storage and any recomputation of layers. Memory is additive, without simulation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.public_models import CONFIGS
from shardwright.ir.graph import Graph
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.machine.presets import preset
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier.enumeration import strategies_on
from shardwright.planner.strategies.frontier.priced_frontier import limited, priced

_SHAPE = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, slots=True)
class Setup:
    """A published training setup.

    Attributes:
        title: model, devices and tokens.
        source: who published it.
        model: of `CONFIGS`.
        machine: the preset.
        batch: sequences of a step on all devices.
        tokens: of a sequence.
        published: the publisher's degrees, as a strategy.
    """

    title: str
    source: str
    model: str
    machine: str
    batch: int
    tokens: int
    published: str


SETUPS = {
    "405B": Setup(
        "Llama 3.1 405B, 512 H100, 8,192 tokens",
        "torchtitan: FSDP 8, TP 8, PP 8, 32 sequences a rank of FSDP, full recomputation",
        "Llama-3.1-405B",
        "64x8xH100-96",
        256,
        8192,
        "dp_shard=8 tp=8 pp=8 mb=32 ac=full",
    ),
    "70B": Setup(
        "Llama 3.1 70B, 256 H100, 8,192 tokens",
        "torchtitan: FSDP 32, TP 8, 16 sequences a rank of FSDP, full recomputation",
        "Llama-3.1-70B",
        "32x8xH100-96",
        512,
        8192,
        "dp_shard=32 tp=8 ac=full",
    ),
    "235B": Setup(
        "Qwen3 235B-A22B, 256 H100, 4,096 tokens",
        "Megatron-Bridge: TP 2, PP 8, EP 32",
        "Qwen3-235B-A22B",
        "32x8xH100",
        1024,
        4096,
        "dp_shard=16 tp=2 pp=8 ep=32 mb=32",
    ),
    "8B": Setup(
        "Llama 3.1 8B, 8 H100, 131,072 tokens",
        "torchtitan: FSDP 2, CP 4, one sequence a rank of FSDP, full recomputation",
        "Llama-3.1-8B",
        "8xH100-96",
        2,
        131072,
        "dp_shard=2 cp=4 ac=full",
    ),
}


def main() -> None:
    """Price all setups, or those that are named, and write that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("-o", "--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for name in asked.only:
        rows.append(row(SETUPS[name]))
        print(rows[-1], flush=True)
    if asked.out is not None:
        record.write({"rows": rows}, asked.out, 0)


def row(setup: Setup) -> dict[str, Any]:
    """The published strategy, the best with its degrees, and the best of all."""
    graph, machine = captured(setup), preset(setup.machine)
    start = time.process_time()
    expansion = Expansion(graph, machine, "adamw")
    every = list(strategies_on(machine, limited(expansion, tp_across_hosts=False)))
    found = priced(expansion, every)
    seconds = time.process_time() - start
    published = Strategy.parse(setup.published)
    alike = [one for one in every if _shape(one) == _shape(published)]
    return {
        "title": setup.title,
        "source": setup.source,
        "machine": setup.machine,
        "device_gib": round(machine.device.usable_bytes / 2**30, 1),
        "strategies": len(every),
        "priced": len(found),
        "cpu_seconds": round(seconds, 1),
        "published": _said(expansion, published),
        "alike": _fastest(priced(expansion, alike) if alike else [], machine),
        "best": _fastest(found, machine),
    }


def captured(setup: Setup) -> Graph:
    """A step of the model of a setup."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {**CONFIGS[setup.model], "max_position_embeddings": setup.tokens}
    config = AutoConfig.for_model(**known)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ids = torch.zeros((setup.batch, setup.tokens), dtype=torch.long)
    graph: Graph = sw.capture(model, (), {"input_ids": ids, "labels": ids}, precision="bf16")
    return graph


def _shape(strategy: Strategy) -> tuple[int, ...]:
    return tuple(getattr(strategy, name) for name in _SHAPE)


def _said(expansion: Expansion, strategy: Strategy) -> dict[str, Any]:
    """The price of a strategy, or why it has none."""
    try:
        return _costs(expansion.expanded(strategy))
    except StrategyError as e:
        return {"strategy": str(strategy), "refused": str(e)}


def _fastest(found: Sequence[Candidate], machine: Machine) -> dict[str, Any] | None:
    """The costs of the fastest strategy that fits; None if none does."""
    limit = machine.device.usable_bytes
    fitting = sorted((one for one in found if one.peak <= limit), key=lambda one: one.cost)
    return _costs(fitting[0]) if fitting else None


def _costs(one: Candidate) -> dict[str, Any]:
    """Seconds of a step and GiB of a rank; of the seconds, those of operators and of messages.

    Of a pipeline, these two are the mean over its groups.
    """
    plan, groups = one.plan(0.0, ()), Strategy.parse(one.name).pp
    messages: dict[str, float] = {}
    for each in plan.transfers:
        for axis in {text.partition(" ")[2] for text in each.collectives}:
            messages[axis] = messages.get(axis, 0.0) + each.seconds / len(each.collectives)
    return {
        "strategy": one.name,
        "seconds": one.point.time,
        "gib": one.peak / 2**30,
        "compute_seconds": sum(op.seconds for op in plan.ops) / groups,
        "message_seconds": {axis: seconds / groups for axis, seconds in messages.items()},
    }


if __name__ == "__main__":
    main()
