"""A GPT-2 training step with exact dropout, relative to one with torch's own kernels.

    python -m benchmarks.dropout.run

Both are programs of one rank, from the same weights, with the same optimizer on
the same batch: one of `rng="exact"`, whose masks are a function of seed, step,
operator and global index, and one of `rng="fast"`, which draws as torch does
and keeps fused attention. One step of the one and one of the other in turn, so
that noise hits both. Reported is the median of the ratios of neighbouring
steps, by time on the wall and by the processor's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from benchmarks import record

SEED = 0
TARGET = 1.10


def example(layers: int, width: int, length: int) -> tuple[GPT2LMHeadModel, dict[str, Any]]:
    """GPT-2 with its usual dropout of 0.1 everywhere."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=1024, n_positions=length, n_layer=layers, n_embd=width, n_head=width // 64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1024, (4, length))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def stepper(rng: str, sizes: tuple[int, int, int]) -> Callable[[], float]:
    """One training step after another."""
    model, batch = example(*sizes)
    plan = sw.plan(model, (), batch, machine=sw.Machine.preset("1xcpu"), rng=rng)
    module = sw.parallelize(model, plan, seed=SEED, tune_host=record.TUNE_HOST)
    optimizer = torch.optim.AdamW(module.parameters())
    return lambda: float(module.train_step(optimizer, batch))


def compare(sizes: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """Median step times and the median ratio."""
    exact, fast = stepper("exact", sizes), stepper("fast", sizes)
    for _ in range(3):
        exact(), fast()
    pairs = [(_timed(exact), _timed(fast)) for _ in range(repeats)]
    found: dict[str, Any] = {"layers": sizes[0], "width": sizes[1], "length": sizes[2]}
    for i, clock in enumerate(("wall", "cpu")):
        ratios = sorted(one[i] / other[i] for one, other in pairs)
        found[clock] = {
            "exact_seconds": statistics.median(one[i] for one, _ in pairs),
            "fast_seconds": statistics.median(other[i] for _, other in pairs),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        }
    return found | {"steps": repeats}


def _timed(step: Callable[[], float]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure, print a line, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = compare((options.layers, options.width, options.length), options.repeats)
        dist.destroy_process_group()
    for clock in ("wall", "cpu"):
        one = found[clock]
        print(
            f"{clock:5} exact {one['exact_seconds'] * 1e3:7.1f} ms"
            f"  fast {one['fast_seconds'] * 1e3:7.1f} ms  ratio {one['ratio']:.3f}"
        )
    result = {"claim": "exact dropout costs at most 10 % of a step", "target": TARGET, **found}
    record.write(result, options.out, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()
