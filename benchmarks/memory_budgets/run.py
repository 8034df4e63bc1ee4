"""Steps within twenty memory budgets: counted peaks, gradients, and times at equal memory.

    python -m benchmarks.memory_budgets.run -o benchmarks/memory_budgets/result.json

A GPT-2, a Llama and a ViT of six layers on one CPU device. Within each of evenly spaced budgets the
fastest plan is trained, of the search over the states of saved tensors and of the one that keeps or
recomputes whole layers. The peak of a step is counted and compared with the predicted one,
gradients of the searched plan are compared with the module's in float64, and steps of both are
timed by turns. With `--no-times` steps are not timed, for a host that does other work.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import shardwright as sw
from benchmarks import record
from benchmarks.recomputation.run import KINDS, searched
from shardwright.ir.plan import Plan
from tests.harness.peak_memory import counted

SEED = 0
BUDGETS, ROUNDS = 20, 7
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 6, 256, 4, 256, 1024, 8
IMAGE, PATCH, CLASSES = 128, 8, 100  # so a sequence has LENGTH patches, and a token more
MACHINE, MESH = "1xcpu", "dp=1"

Batch = dict[str, torch.Tensor]
Subject = tuple[nn.Module, Batch]


def gpt2() -> Subject:
    """GPT-2 without dropout, so that it can be compared with itself, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, vocab_size=VOCABULARY,
        bos_token_id=0, eos_token_id=0, **quiet,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _words()


def llama() -> Subject:
    """A Llama in which two heads share keys and values, and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=704, vocab_size=VOCABULARY,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config), _words()


def vit() -> Subject:
    """A ViT that classifies images, and a batch."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
        num_attention_heads=HEADS, image_size=IMAGE, patch_size=PATCH, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.randint(CLASSES, (BATCH,)),
    }


def _words() -> Batch:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids}


SUBJECTS: dict[str, Callable[[], Subject]] = {"GPT-2": gpt2, "Llama": llama, "ViT": vit}


def fastest(plans: list[Plan], budget: int) -> Plan:
    """The fastest plan that is predicted to fit."""
    return min((p for p in plans if p.peak_bytes <= budget), key=lambda p: p.step_seconds)


class Measured:
    """What is measured of plans of one model, each plan once."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self._rows: dict[int, dict[str, Any]] = {}

    def row(self, plan: Plan, *, verified: bool) -> dict[str, Any]:
        """Predicted and counted peak, and where `verified` the largest error of a gradient."""
        row = self._rows.setdefault(
            id(plan),
            {
                "predicted_bytes": plan.peak_bytes,
                "predicted_seconds": plan.step_seconds,
                "recomputed": sum(op.runs_again for op in plan.ops),
                "kept": sum(op.kept and op.seconds > 0 for op in plan.ops),
            },
        )
        if "counted_bytes" not in row:
            module = sw.parallelize(copy.deepcopy(self.model), plan, tune_host=False)
            row["counted_bytes"] = counted(module, self.batch)
        if verified and "gradient_error" not in row:
            report = sw.verify(self.model, plan, (), self.batch)
            row["gradient_error"] = report.max_gradient_error
        return row

    def seconds(self, plans: dict[str, Plan]) -> dict[str, float]:
        """The median seconds of steps of each plan, made by turns."""
        steps = {}
        for name, plan in plans.items():
            module = sw.parallelize(copy.deepcopy(self.model), plan, tune_host=False)
            steps[name] = module, torch.optim.AdamW(module.parameters(), foreach=False)
        taken: dict[str, list[float]] = {name: [] for name in plans}
        for number in range(ROUNDS + 1):
            for name, (module, optimizer) in steps.items():
                start = time.perf_counter()
                module.train_step(optimizer, self.batch)
                if number:  # the first step makes the optimizer's state
                    taken[name].append(time.perf_counter() - start)
        return {name: median(each) for name, each in taken.items()}


def budgets(name: str, *, times: bool) -> list[dict[str, Any]]:
    """A row for each budget of a model, the largest first."""
    torch.manual_seed(SEED)
    model, batch = SUBJECTS[name]()
    graph, machine = sw.capture(model, kwargs=batch), sw.Machine.preset(MACHINE)
    plans = {kind: searched(graph, machine, how, MESH)[0] for kind, how in KINDS.items()}
    peaks = [[plan.peak_bytes for plan in found] for found in plans.values()]
    least, most = max(map(min, peaks)), min(map(max, peaks))
    measured, rows = Measured(model, batch), []
    for i in reversed(range(BUDGETS)):
        budget = least + (most - least) * i // (BUDGETS - 1)
        chosen = {kind: fastest(found, budget) for kind, found in plans.items()}
        row: dict[str, Any] = {"budget": budget}
        for kind, plan in chosen.items():
            row[kind] = dict(measured.row(plan, verified=kind == "operators"))
        if times:
            for kind, seconds in measured.seconds(chosen).items():
                row[kind]["seconds"] = seconds
        rows.append(row)
        print(name, row, flush=True)
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--no-times", action="store_true", help="time no steps")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=[*SUBJECTS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: budgets(name, times=not args.no_times) for name in args.only}
    if args.output:
        sizes = {"layers": LAYERS, "width": WIDTH, "tokens": BATCH * LENGTH}
        record.write({"sizes": sizes, "models": models}, args.output, SEED)


if __name__ == "__main__":
    main()
