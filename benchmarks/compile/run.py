"""CPU seconds that `torch.compile` takes for a step, by number of layers.

    python -m benchmarks.compile.run -o benchmarks/compile/result.json

Every number of layers is a process of its own without caches. The seconds are those of the first
step, of all threads and of the compilers that it starts, without those of the third one.
GPT-2 draws random numbers in every layer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import shardwright as sw
from benchmarks import record

SEED = 0
LAYERS = (2, 32)
AIM = 1.3  # seconds of the most layers over those of the fewest


def gpt2(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2, 64 wide, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=32, n_layer=layers, n_embd=64, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(256, (4, 32))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Llama, 64 wide, grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(256, (4, 32))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


MODELS = {"gpt2": gpt2, "llama": llama}


def one(name: str, layers: int) -> dict[str, Any]:
    """Seconds to compile a model, and the number of functions that the compiler made."""
    torch.manual_seed(SEED)
    model, batch = MODELS[name](layers)
    plan = sw.plan(model, (), batch, machine=sw.Machine.preset("1xcpu"))
    module: Any = sw.parallelize(model, plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.compile_programs()
    steps = []
    for _ in range(3):
        start = _seconds()
        module.train_step(optimizer, batch)
        steps.append(_seconds() - start)
    return {"seconds": steps[0] - steps[-1], "functions": counters["stats"]["unique_graphs"]}


def _seconds() -> float:
    """CPU seconds of this process, and of those that it has started and that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def rows(names: Sequence[str], layers: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The results by model and number of layers, each from a process of its own."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for count in layers:
            with tempfile.TemporaryDirectory() as folder:
                environment = {
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": folder,
                    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in this process, whose time is taken
                }
                command = [sys.executable, "-m", "benchmarks.compile.run", "--one", name]
                done = subprocess.run(
                    [*command, "--layers", str(count)],
                    env=environment, capture_output=True, text=True, check=True,
                )  # fmt: skip
            found.setdefault(name, {})[str(count)] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name}, {count} layers: {found[name][str(count)]}", flush=True)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--out", type=Path, help="where the result is written, as JSON")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.layers[0])))
        return
    found = rows(args.models, args.layers)
    result = {"layers": args.layers, "aim": AIM, "rows": found}
    if args.out is not None:
        record.write(result, args.out, SEED)


if __name__ == "__main__":
    main()
