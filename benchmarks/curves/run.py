"""One loss curve: GPT-2 on bytes, dropout on, under every kind of plan and resumed across them.

    python -m benchmarks.curves.run

AdamW with groups, clipping and accumulation. One device trains all steps; so does every kind of
plan on 2 to 4 ranks; and two runs are saved and resumed on 2, 4, 1 and 3 ranks in turn.
Reported is the largest relative difference of a loss to that of one device, for 300 steps in
float32 and for 40 in float64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from benchmarks import record
from examples.bytes_gpt import source_code
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.loop import EvaluationRecord, StepRecord, start, train

SEED, BATCH, LENGTH = 0, 12, 32
BOUNDS = {"float64": 1e-9, "float32": 1e-3}
STEPS = {"float64": 40, "float32": 300}
LEGS = (  # of two runs that are resumed, on other devices under another kind of plan
    {2: "fully sharded", 4: "data x tensor parallel", 1: "fastest", 3: "data parallel"},
    {2: "pipeline", 4: "pipeline x data parallel", 1: "fastest", 3: "tensor parallel"},
)
PLANS = {
    2: ("data parallel", "fully sharded", "tensor parallel", "pipeline"),
    3: ("data parallel", "tensor parallel"),
    4: ("data x tensor parallel", "fully sharded x tensor parallel", "pipeline x data parallel"),
}


class Language(torch.nn.Module):
    """GPT-2 that computes its loss in its own dtype: Hugging Face's would round it to float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_layer=2, n_embd=48, n_head=4, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config).to(dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of (BATCH, LENGTH) bytes, each but the first told from those before."""
        logits = self.model(input_ids).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def job(dtype: str, steps: int) -> Job:
    """The one job that all runs do."""
    code = source_code()

    def data() -> Any:
        while True:
            starts = torch.randint(len(code) - LENGTH, (BATCH, 1))
            yield {"input_ids": code[starts + torch.arange(LENGTH)].long()}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        vectors = [p for p in given if p.dim() < 2]
        return torch.optim.AdamW(
            [{"params": [p for p in given if p.dim() >= 2], "weight_decay": 0.1},
             {"params": vectors, "weight_decay": 0.0}], lr=1e-3,
        )  # fmt: skip

    return Job(
        model=lambda: Language(getattr(torch, dtype)),
        batch=lambda: {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)},
        optimizer=optimizer,
        data=data,
        steps=steps,
        clip_norm=1.0,
        accumulate=2,
        seed=SEED,
    )


def rank(number: int, world: int, folder: str, text: str, dtype: str, until: int) -> None:
    """One rank, until step `until`."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{world}-{until}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=world)
    losses, first = leg(folder, text, dtype, until)
    if number == 0:
        Path(folder, f"losses-{first}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def leg(folder: str, text: str, dtype: str, until: int) -> tuple[list[float], int]:
    """On every rank: train until step `until`, from the checkpoint in `folder` if there is one.

    The losses, and the step that they begin after.
    """
    work, plan = job(dtype, until), sw.Plan.from_json(text)
    seed_all(work.seed)
    module = ShapeVariants(work.model(), plan, [], seed=work.seed)
    seed_all(work.seed)
    run, checkpoints = start(module, work), Checkpoints(f"{folder}/runs", plan)
    checkpoints.resume(run)
    first, losses = run.step, []

    def keep(one: StepRecord | EvaluationRecord) -> None:
        assert isinstance(one, StepRecord), "the job has no evaluation"
        losses.append(one.loss)

    train(run, replace(work, steps=until), torch.device("cpu"), keep)
    checkpoints.save(run)
    return losses, first


def curve(legs: list[tuple[sw.Plan, int]], dtype: str) -> list[float]:
    """The losses of a run that goes to a step under each plan in turn."""
    mp.get_context("forkserver").set_forkserver_preload(["benchmarks.curves.run"])
    with tempfile.TemporaryDirectory() as folder:
        for plan, until in legs:
            given = (plan.devices, folder, plan_to_json(plan), dtype, until)
            start_processes(rank, given, nprocs=plan.devices, start_method="forkserver")
        files = sorted(Path(folder).glob("losses-*.json"), key=lambda f: int(f.stem.split("-")[1]))
        return [loss for file in files for loss in json.loads(file.read_text())]


def plans(dtype: str, devices: int, steps: int) -> dict[str, sw.Plan]:
    """Plans by name, pipelines among them."""
    work = job(dtype, steps)
    graph = sw.capture(work.model(), (), dict(work.call()[1]))
    machine = sw.Machine.preset(f"{devices}xcpu")
    frontier = sw.search(graph, machine)
    found = {plan.name: plan for plan in frontier.baselines} | {"fastest": frontier[0]}
    if devices % 2 == 0:
        staged = sw.search(graph, machine, stages=(2,), micro_batches=(2,))
        name = "pipeline" if devices == 2 else "pipeline x data parallel"
        found |= {name: next(plan for plan in staged if plan.stages == 2)}
    return found


def measured(dtype: str, steps: int) -> dict[str, Any]:
    """Largest relative difference of every run, and how the loss went."""
    known = {n: plans(dtype, n, steps) for n in (1, 2, 3, 4)}
    one = curve([(known[1]["fastest"], steps)], dtype)
    found: dict[str, Any] = {"first": one[0], "last": one[-1], "largest_difference": {}}

    def compare(name: str, legs: list[tuple[sw.Plan, int]]) -> None:
        begin, losses = time.perf_counter(), curve(legs, dtype)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, one, strict=True))
        found["largest_difference"][name] = apart
        print(f"{name:40} {apart:.2e}  ({time.perf_counter() - begin:.0f} s)", flush=True)

    for devices, names in PLANS.items():
        for name in names:
            compare(f"{name} on {devices}", [(known[devices][name], steps)])
    for kinds in LEGS:
        ends = [steps * (i + 1) // len(kinds) for i in range(len(kinds))]
        legs = [(known[n][name], end) for (n, name), end in zip(kinds.items(), ends, strict=True)]
        compare("resumed: " + ", ".join(f"{name} on {n}" for n, name in kinds.items()), legs)
    return found


def main() -> None:
    """Train, compare, write the result after each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dtype", choices=BOUNDS, action="append", help="by default both")
    parser.add_argument("--steps", type=int, help="instead of 300 in float32 and 40 in float64")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    claim = "every plan, and a run resumed across them, has one loss curve"
    runs: dict[str, Any] = {}
    for dtype in options.dtype or BOUNDS:
        steps, bound = options.steps or STEPS[dtype], BOUNDS[dtype]
        runs[dtype] = {"bound": bound, "steps": steps, **measured(dtype, steps)}
        record.write({"claim": claim, "runs": runs}, options.out, SEED)
        one, worst = runs[dtype], max(runs[dtype]["largest_difference"].values())
        print(f"{dtype}: {one['first']:.4f} -> {one['last']:.4f}; worst {worst:.2e}, bound {bound}")
    raise SystemExit(0 if all(map(good, runs.values())) else 1)


def good(run: dict[str, Any]) -> bool:
    """Whether all curves are one, within the bound."""
    return bool(max(run["largest_difference"].values()) <= run["bound"])


if __name__ == "__main__":
    main()
