"""One loss curve: GPT-2 on bytes, dropout on, under every kind of plan and resumed across them.

    python -m benchmarks.curves.run
    python -m benchmarks.curves.run --dtype float64 --steps 40

AdamW with groups, clipping and accumulation. One device trains all steps; so does every kind of
plan on 2 to 4 ranks; and one run is saved and resumed on 2, 4, 1 and 3 ranks in turn.
Reported is the largest relative difference of a loss to that of one device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from benchmarks import record
from examples.bytes_gpt import source_code
from shardwright.runtime.shapes import ManyShapes
from shardwright.train.checkpoint import Checkpoints
from shardwright.train.job import Job
from shardwright.train.loop import start, train
from shardwright.train.randomness import seed_all

SEED, BATCH, LENGTH = 0, 12, 32
BOUNDS = {"float32": 1e-3, "float64": 1e-9}
LEGS = {2: "fully sharded", 4: "data x tensor parallel", 1: "fastest", 3: "data parallel"}
PLANS = {
    2: ("data parallel", "fully sharded", "tensor parallel", "pipeline"),
    3: ("data parallel",),
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
    """One rank, until step `until`: from the checkpoint in `folder` if there is one."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{world}-{until}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=world)
    work, plan = job(dtype, until), sw.Plan.from_json(text)
    seed_all(work.seed)
    module = ManyShapes(work.model(), plan, [], seed=work.seed)
    seed_all(work.seed)
    run, checkpoints, losses = start(module, work), Checkpoints(f"{folder}/runs", plan), []
    saved, _ = checkpoints.resume(run)
    train(run, work, until, torch.device("cpu"), lambda one: losses.append(one.loss))
    checkpoints.save(run)
    if number == 0:
        first = saved.step if saved else 0
        Path(folder, f"losses-{first}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def curve(legs: list[tuple[sw.Plan, int]], dtype: str) -> list[float]:
    """The losses of a run that goes to a step under each plan in turn."""
    with tempfile.TemporaryDirectory() as folder:
        for plan, until in legs:
            given = (plan.devices, folder, plan.to_json(), dtype, until)
            mp.spawn(rank, given, nprocs=plan.devices)
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
    ends = [steps * (i + 1) // len(LEGS) for i in range(len(LEGS))]
    legs = [(known[n][name], end) for (n, name), end in zip(LEGS.items(), ends, strict=True)]
    compare("resumed on " + ", ".join(map(str, LEGS)), legs)
    return found


def main() -> None:
    """Train, compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dtype", choices=BOUNDS, default="float32")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measured(options.dtype, options.steps)
    worst, bound = max(result["largest_difference"].values()), BOUNDS[options.dtype]
    print(f"loss {result['first']:.4f} -> {result['last']:.4f}; worst {worst:.2e}, bound {bound}")
    claim = f"every plan, and a run resumed across them, has one loss curve, to {bound}"
    out = options.out or Path(__file__).with_name(f"{options.dtype}.json")
    sizes = {"dtype": options.dtype, "steps": options.steps}
    record.write({"claim": claim, "bound": bound, **sizes, **result}, out, SEED)
    raise SystemExit(0 if worst <= bound else 1)


if __name__ == "__main__":
    main()
