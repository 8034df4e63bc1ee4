"""Tokens that go to their experts once to each host, beside tokens that go to each device.

    python -m benchmarks.wide.by_host -o benchmarks/wide/by_host.json

A mixture with its experts on two hosts, two processes on each, whose links are slow
(`benchmarks/hosts`). The same plan runs with and without its hop between hosts, a step of each in
turn, in pairs whose order changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import shardwright as sw
from benchmarks import record
from benchmarks.hosts import Link, hosts
from benchmarks.wide.models import SEED, Built
from benchmarks.wide.speed import ratios, timed_in_turn
from shardwright.plan_io.plan_text import plan_to_json

HOSTS, EACH = 2, 2
STRATEGY = f"dp_shard={HOSTS * EACH} ep={HOSTS * EACH}"
SAMPLES, SEQUENCE = 32, 128


def model() -> Built:
    """A mixture of 32 experts, of which a token has eight."""
    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=32, num_experts_per_tok=8,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(config.vocab_size, (SAMPLES, SEQUENCE), generator=generator)
    return Qwen3MoeForCausalLM(config), {"input_ids": ids, "labels": ids}


def plans() -> list[sw.Plan]:
    """The plan that sends tokens to hosts first, and the one that does not."""
    built, batch = model()
    graph = sw.capture(built, (), batch)
    by_host = sw.price(graph, f"{HOSTS}x{EACH}xH100", STRATEGY)
    assert by_host.host_devices == EACH
    return [by_host, replace(by_host, host_devices=0)]


def on_rank(rounds: int, texts: list[str]) -> None:
    """Run both plans; rank 0 prints the seconds of each round."""
    dist.init_process_group("gloo")
    found = timed_in_turn(model, texts, rounds)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure on hosts that are made for it, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--gbit-per-s", type=float, default=0.1)
    parser.add_argument("--on-rank", type=Path, help="the plans; set where torchrun starts a rank")
    asked = parser.parse_args()
    if asked.on_rank:
        on_rank(asked.rounds, json.loads(asked.on_rank.read_text()))
        return
    if asked.output is None:
        parser.error("say where to write the result: -o FILE")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plans"
        file.write_text(json.dumps([plan_to_json(plan) for plan in plans()]))
        with hosts(HOSTS, Link(asked.gbit_per_s * 1e9)) as cluster:
            printed = cluster.torchrun(
                "benchmarks.wide.by_host",
                *("--rounds", str(asked.rounds), "--on-rank", str(file)),
                timeout_seconds=540,
                processes_per_host=EACH,
            )
    seconds = json.loads(next(line for line in printed[0].splitlines() if line.startswith("[[")))
    result = {"strategy": STRATEGY, "gbit_per_s": asked.gbit_per_s, **ratios(seconds)}
    print(result, file=sys.stderr)
    record.write(result, asked.output, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()
