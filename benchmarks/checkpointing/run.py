"""What a checkpoint every 50 steps costs: in the background, and with steps that wait for it.

    python -m benchmarks.checkpointing.run

A GPT-2 trains on two ranks, fully sharded. A round is 50 steps without a checkpoint, 50 steps with
one written in the background, and 50 with one that is waited for, in an order that
changes from round to round. A checkpoint is begun after the round's first step and
is on the disk when the round ends. Reported are medians of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from benchmarks import record
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.state import Steppable
from shardwright.train.job import Job
from shardwright.train.loop import start
from shardwright.train.step import Stepper

SEED, RANKS, TARGET = 0, 2, 1.05
PLAIN, BACKGROUND, WAITING = "no checkpoint", "in the background", "waited for"
HOW = (PLAIN, BACKGROUND, WAITING)


def model() -> GPT2LMHeadModel:
    """GPT-2, 4 layers of 384: 7.6 million parameters, 92 MB with AdamW's state."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=1024, n_positions=128, n_layer=4, n_embd=384, n_head=6, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch() -> dict[str, torch.Tensor]:
    """Eight sequences of 128 tokens."""
    ids = torch.randint(1024, (8, 128), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": ids, "labels": ids}


JOB = Job(model, batch, lambda p: torch.optim.AdamW(p, lr=1e-4), lambda: iter([batch()]), 10**6)


def rank(number: int, folder: str, text: str, rounds: int, every: int, cpu_time: bool) -> None:
    """One rank: all rounds; rank 0 writes what they took."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS
    )
    plan = sw.Plan.from_json(text)
    run = start(sw.parallelize(model(), plan, tune_host=record.TUNE_HOST), JOB)  # type: ignore[arg-type]
    step = Stepper.of(cast(Steppable, run.module), clip_norm=None)
    checkpoints = Checkpoints(f"{folder}/runs", plan, keep=2)
    clock = time.process_time if cpu_time else time.perf_counter

    def seconds(how: str) -> float:
        dist.barrier()
        begin = clock()
        for i in range(every):
            step(run, [next(run.batches)])
            if i == 0 and how != PLAIN:
                checkpoints.begin(run)
                if how == WAITING:
                    checkpoints.settle()
        checkpoints.settle()
        return clock() - begin

    for how in HOW:
        seconds(how)
    found = []
    for i in range(rounds):
        order = HOW[i % 3 :] + HOW[: i % 3]
        found.append({how: seconds(how) for how in order})
    if number == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(rounds: int, every: int, cpu_time: bool) -> dict[str, Any]:
    """Median seconds of a round, and median ratios to a round without a checkpoint."""
    graph = sw.capture(model(), (), batch())
    named = {p.name: p for p in sw.search(graph, sw.Machine.preset(f"{RANKS}xcpu")).baselines}
    text = plan_to_json(named["fully sharded"])
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank, (folder, text, rounds, every, cpu_time), nprocs=RANKS)
        found = json.loads(Path(folder, "found.json").read_text())
        last = sorted(Path(folder, "runs").iterdir())[-1]
        size = sum(file.stat().st_size for file in last.iterdir())
    result: dict[str, Any] = {"rounds": rounds, "every": every, "checkpoint_bytes": size}
    for how in HOW:
        result[how] = {"seconds": statistics.median(one[how] for one in found)}
        if how != PLAIN:
            ratios = sorted(one[how] / one[PLAIN] for one in found)
            quartiles = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
            result[how] |= {"ratio": statistics.median(ratios), "ratio_quartiles": quartiles}
    return result


def main() -> None:
    """Measure, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=50, help="steps of a round")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, all threads")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    result = measured(options.rounds, options.every, options.cpu_time)
    for how in (BACKGROUND, WAITING):
        print(f"{how}: {result[how]['ratio']:.3f} of {result[PLAIN]['seconds']:.2f} s")
    claim = "a checkpoint every 50 steps costs less than 5 % when written in the background"
    record.write(
        {"claim": claim, "target_ratio": TARGET, **result},
        options.out,
        SEED,
        tuned=record.TUNE_HOST,
    )


if __name__ == "__main__":
    main()
