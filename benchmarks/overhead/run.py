"""Step time of the lowered program on a one-device mesh, relative to the plain module.

    python -m benchmarks.overhead.run

Three train with the same optimizer on the same batch, one step of each in
turn, so that noise hits all: the plain module; the lowered program as it runs
without a process group, on plain parameters; and in a process group of one,
where parameters are DTensors. AdamW comes as users write it, one operator per
parameter at a time, of which each costs a DTensor's dispatch, and fused.
Reported are the medians of the ratios of neighbouring steps. Dropout is off:
plain and lowered draw their masks differently.
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
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright as sw
from benchmarks import record

SEED = 0
TARGET = 1.03


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2, 4 layers of 384."""
    config = GPT2Config(
        vocab_size=1024, n_positions=256, n_layer=4, n_embd=384, n_head=6, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(1024, (4, 256))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """Llama, 4 layers of 384, grouped queries."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=384, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    ids = torch.randint(1024, (4, 256))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


class VGG(nn.Module):
    """Convolutions with ReLU in place, pools and two linear layers, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((3, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(256 * 16, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 10)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.classifier(torch.flatten(self.features(images), 1))
        return nn.functional.cross_entropy(scores, labels)


def vgg() -> tuple[nn.Module, dict[str, Any]]:
    """A small VGG on 32 x 32 images."""
    return VGG(), {"images": torch.randn(32, 3, 32, 32), "labels": torch.randint(10, (32,))}


class MLP(nn.Module):
    """Four layers and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((512, 2048), (2048, 2048), (2048, 2048), (2048, 16))
        self.layers = nn.ModuleList(nn.Linear(inside, outside) for inside, outside in sizes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, y)


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    """Four layers, 2048 wide."""
    return MLP(), {"x": torch.randn(256, 512), "y": torch.randn(256, 16)}


MODELS = {"gpt2": gpt2, "llama": llama, "vgg": vgg, "mlp": mlp}
OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {}, "fused AdamW": {"fused": True}}
PLAIN, TENSORS, DTENSORS = "plain", "lowered", "lowered, process group"


def compare(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]],
    options: dict[str, Any],
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Median step times and the median ratios to the plain module, for one model and optimizer."""
    steps = {PLAIN: _plain_step(make, options), TENSORS: _our_step(make, options)}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            steps[DTENSORS] = _our_step(make, options)
            losses = [[step() for step in steps.values()] for _ in range(3)]
            rounds = [_round(steps, clock, first=i) for i in range(repeats)]
        finally:
            dist.destroy_process_group()
    found: dict[str, Any] = {"steps": repeats}
    for name in steps:
        found[name] = {"seconds": statistics.median(seconds[name] for seconds in rounds)}
        if name != PLAIN:
            ratios = sorted(seconds[name] / seconds[PLAIN] for seconds in rounds)
            found[name]["ratio"] = statistics.median(ratios)
            quartiles = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
            found[name]["ratio_quartiles"] = quartiles
    found["largest_loss_difference"] = max(max(three) - min(three) for three in losses)
    return found


def _plain_step(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], options: dict[str, Any]
) -> Callable[[], float]:
    torch.manual_seed(SEED)
    module, batch = make()
    optimizer = torch.optim.AdamW(module.parameters(), **options)

    def step() -> float:
        optimizer.zero_grad()
        returned = module(**batch)
        loss = returned if isinstance(returned, torch.Tensor) else returned.loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _our_step(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], options: dict[str, Any]
) -> Callable[[], float]:
    torch.manual_seed(SEED)
    module, batch = make()
    plan = sw.plan(module, (), batch, machine=sw.Machine.preset("1xcpu"))
    parallel = sw.parallelize(module, plan, tune_host=record.TUNE_HOST)
    optimizer = torch.optim.AdamW(parallel.parameters(), **options)
    return lambda: float(parallel.train_step(optimizer, batch))


def _round(
    steps: dict[str, Callable[[], float]], clock: Callable[[], float], first: int
) -> dict[str, float]:
    """Seconds of one step of each; who begins changes from round to round."""
    names = list(steps)
    seconds = {}
    for i in range(len(names)):
        name = names[(first + i) % len(names)]
        start = clock()
        steps[name]()
        seconds[name] = clock() - start
    return seconds


def main() -> None:
    """Measure all models, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of one thread: for a busy machine"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    if options.cpu_time:
        torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    results: dict[str, Any] = {}
    for name in options.models:
        for optimizer, how in OPTIMIZERS.items():
            found = compare(MODELS[name], how, options.repeats, clock)
            results.setdefault(name, {})[optimizer] = found
            print(
                f"{name:6} {optimizer:12} plain {found[PLAIN]['seconds'] * 1e3:7.1f} ms"
                f"  lowered {found[TENSORS]['ratio']:.3f}"
                f"  with a process group {found[DTENSORS]['ratio']:.3f}",
                flush=True,
            )
    result = {
        "claim": "one rank costs at most 3 %",
        "target": TARGET,
        "clock": "CPU seconds of one thread" if options.cpu_time else "wall seconds",
        "models": results,
    }
    record.write(result, options.out, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()
