"""Step time of the lowered program on a one-device mesh, relative to the plain module.

    python -m benchmarks.overhead.run

Both train with the same optimizer on the same batch, one step of the one and
one of the other in turn, so that noise hits both. Reported is the median of
the ratios of neighbouring steps. Dropout is off: the two draw their masks
differently, and dropout has a benchmark of its own.
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


class SmallVGG(nn.Module):
    """Convolutions, pools and two big linear layers, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(128 * 16, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 10)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.classifier(torch.flatten(self.features(images), 1))
        return nn.functional.cross_entropy(scores, labels)


def vgg() -> tuple[nn.Module, dict[str, Any]]:
    """A small VGG on 32 x 32 images."""
    return SmallVGG(), {"images": torch.randn(32, 3, 32, 32), "labels": torch.randint(10, (32,))}


MODELS = {"gpt2": gpt2, "llama": llama, "vgg": vgg}


def compare(make: Callable[[], tuple[nn.Module, dict[str, Any]]], repeats: int) -> dict[str, Any]:
    """Median step times and the median ratio for one model."""
    torch.manual_seed(SEED)
    plain, batch = make()
    torch.manual_seed(SEED)
    twin, _ = make()
    machine = sw.Machine.preset("1xcpu")
    module = sw.parallelize(twin, sw.plan(twin, (), batch, machine=machine))
    ours, theirs = torch.optim.AdamW(module.parameters()), torch.optim.AdamW(plain.parameters())

    def plain_step() -> float:
        theirs.zero_grad()
        returned = plain(**batch)
        loss = returned if isinstance(returned, torch.Tensor) else returned.loss
        loss.backward()
        theirs.step()
        return float(loss)

    def our_step() -> float:
        return float(module.train_step(ours, batch))

    losses = [(plain_step(), our_step()) for _ in range(3)]
    pairs = [(_timed(plain_step), _timed(our_step)) for _ in range(repeats)]
    ratios = sorted(b / a for a, b in pairs)
    return {
        "plain_seconds": statistics.median(a for a, _ in pairs),
        "lowered_seconds": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "largest_loss_difference": max(abs(a - b) for a, b in losses),
        "steps": repeats,
    }


def _timed(step: Callable[[], float]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Measure all models, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = {}
        for name, make in MODELS.items():
            results[name] = found = compare(make, options.repeats)
            print(
                f"{name:6} plain {found['plain_seconds'] * 1e3:7.1f} ms"
                f"  lowered {found['lowered_seconds'] * 1e3:7.1f} ms  ratio {found['ratio']:.3f}"
            )
        dist.destroy_process_group()
    result = {"claim": "one rank costs at most 3 %", "target": TARGET, "models": results}
    record.write(result, options.out, SEED)


if __name__ == "__main__":
    main()
