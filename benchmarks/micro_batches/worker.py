"""A rank that takes a step whenever it is told to, by the package that PYTHONPATH names.

`run` starts it twice on each host, from two commits; it imports nothing else of this repository.
The environment has the process group's address and this rank.
"""

from __future__ import annotations

import argparse
import inspect
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright as sw

VOCABULARY = 4096
LEARNING_RATE = 1e-4
POLL_SECONDS = 2e-3


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2, 6 layers of 384, without dropout; 8 x 128 tokens."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_layer=6, n_embd=384, n_head=6, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _tokens(8, 128)


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """Llama, 4 layers of 512, grouped queries; 8 x 256 tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config), {**_tokens(8, 256), "use_cache": False}


class MLP(nn.Module):
    """Linear layers with GELUs, and the loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    """Six layers of 1024; 1,024 rows."""
    return MLP(1024, 6), {"x": torch.randn(1024, 1024)}


MODELS = {"gpt2": gpt2, "llama": llama, "mlp": mlp}


def _tokens(batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (batch, length))
    return {"input_ids": ids, "labels": ids}


def plan_of(graph: Any, ranks: int, count: int) -> Any:
    """The fully sharded baseline of `ranks` in `count` micro-batches."""
    found = sw.search(graph, sw.Machine.preset(f"{ranks}xcpu"), micro_batches=(count,))
    return next(plan for plan in found.baselines if plan.name == "fully sharded")


def main() -> None:
    """Prepare, then take a step for every file that says so, until one says that it is over."""
    options = _options()
    tree = options.tree.resolve()
    if tree not in Path(str(sw.__file__)).resolve().parents:
        raise SystemExit(f"shardwright is {sw.__file__}, and not of {tree}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        model, batch = MODELS[options.model]()
        plan = plan_of(sw.capture(model, (), batch), dist.get_world_size(), options.micro_batches)
        # Earlier commits tune the host unasked.
        tuned = "tune_host" in inspect.signature(sw.parallelize).parameters
        how: dict[str, Any] = {"tune_host": True} if tuned else {}
        module: Any = sw.parallelize(model, plan, **how)
        optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
        number = 0
        while _told(options.folder, options.side, number):
            dist.barrier()
            start = time.perf_counter()
            loss = float(module.train_step(optimizer, batch))
            _say(options, number, f"{time.perf_counter() - start!r} {loss!r}")
            number += 1
        dist.barrier()  # none leaves while another still sends
    finally:
        dist.destroy_process_group()


def _told(folder: Path, side: str, number: int) -> bool:
    """Wait for the file of a step; False if there will be no more."""
    step, end = folder / f"{side}.{number}", folder / "end"
    while not step.exists():
        if end.exists():
            return False
        time.sleep(POLL_SECONDS)
    return True


def _say(options: argparse.Namespace, number: int, text: str) -> None:
    file = options.folder / f"{options.side}.{number}.rank{dist.get_rank()}"
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    os.replace(part, file)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, required=True, help="whose package is to run")
    parser.add_argument("--folder", type=Path, required=True, help="of the files")
    parser.add_argument("--side", required=True, help="name of this commit in file names")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
