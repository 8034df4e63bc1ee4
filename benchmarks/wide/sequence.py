"""Long sequences: what fits, what is planned and what is fast when the sequence is split.

    python -m benchmarks.wide.sequence -o benchmarks/wide/sequence.json

* `memory`: a step of a small Llama on 32k tokens, by one process and by four that share the
  sequence. Each may allocate `ALLOWED` bytes more than it has once torch is there; the
  system enforces that (`RLIMIT_DATA`).
* `plan`: Llama-3-8B on 128k tokens a sample for 64 H100: the fastest plan, and the fastest of
  those that split no sequence, both by the cost model and within 80 GiB.
* `speed`: a small Llama on two local ranks, a step of the plan chosen and one of the best that
  splits no sequence in turn, in rounds whose order changes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import shardwright as sw
from benchmarks import record
from shardwright.ir.frontier import InfeasibleError

SEED = 0
PARTS = ("memory", "plan", "speed")
ALLOWED = 2**30  # bytes
_WITHOUT = ("forbid *=*:sequence",)
_ALIKE = 1e-4  # how far losses may be apart, relatively
Built = tuple[nn.Module, dict[str, Any]]


def llama(length: int, batch: int = 1, **sizes: int) -> Built:
    """A Llama with two queries to each key, and tokens for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=1024, max_position_embeddings=length, **sizes)
    torch.manual_seed(SEED)
    ids = torch.randint(1024, (batch, length), device="cpu")
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def for_memory() -> Built:
    """Two layers of 128 on 32k tokens."""
    return llama(
        2**15, hidden_size=128, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip


def for_speed() -> Built:
    """Four layers of 256 on 8k tokens."""
    return llama(
        2**13, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip


def published() -> Built:
    """Llama-3-8B in bfloat16 on eight samples of 128k tokens, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2**17,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros((8, 2**17), dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def splits_sequence(plan: sw.Plan) -> bool:
    """Whether attention of `plan` shares queries of one sample."""
    return any("sequence" in word for op in plan.ops for word in op.splits)


def attention_of(plan: sw.Plan) -> str:
    """What the attention of `plan` does along each axis."""
    (found,) = {
        " ".join(f"{axis}:{word}" for axis, word in zip(plan.mesh.names, op.splits, strict=True))
        for op in plan.ops
        if "attention" in op.target
    }
    return found


def memory(devices: int = 4) -> dict[str, Any]:
    """Whether one process, and each of some that share the sequence, does with `ALLOWED` bytes."""
    model, batch = for_memory()
    graph = sw.capture(model, (), batch)
    machine = sw.Machine.preset(f"{devices}xcpu")
    plan = sw.search(graph, machine).fastest(f"{ALLOWED}B")
    alone = sw.search(graph, sw.Machine.preset("1xcpu")).smallest()
    found = {"tokens": batch["input_ids"].shape[1], "allowed_bytes": ALLOWED}
    for name, one in (("one", alone), ("shared", plan)):
        outcome = _ranks(one.devices, _limited, one.to_json())
        found[name] = {
            "devices": one.devices,
            "attention": attention_of(one),
            "predicted_bytes": one.peak_bytes,
            "outcome": outcome,
        }
        print(name, found[name], flush=True)
    return found


def _limited(rank: int, store: str, text: str) -> None:
    """One step within the limit; what came of it, by rank 0."""
    plan = sw.Plan.from_json(text)
    outcome = "ran"
    try:
        module, batch = for_memory()
        parallel = sw.parallelize(module, plan)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        resource.setrlimit(resource.RLIMIT_DATA, (_held() + ALLOWED,) * 2)
        started = time.perf_counter()
        loss = float(parallel.train_step(optimizer, batch))
        outcome = f"ran in {time.perf_counter() - started:.1f} s, loss {loss:.4f}"
    except (RuntimeError, MemoryError) as e:
        if plan.devices > 1 or not (isinstance(e, MemoryError) or "alloc" in str(e)):
            raise  # others would wait for this one
        outcome = "out of memory"
    if rank == 0:
        Path(store).with_suffix(".result").write_text(outcome)


def _held() -> int:
    """Bytes of data that this process has, as `RLIMIT_DATA` counts them."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmData" in x)
    return int(line.split()[1]) * 1024


def plan() -> dict[str, Any]:
    """Step times by the cost model with the sequence split and without."""
    model, batch = published()
    graph = sw.capture(model, (), batch)
    machine = sw.Machine.preset("8x8xH100")
    found: dict[str, Any] = {"tokens": 2**17, "samples": 8, "limit": "80GiB"}
    for name, constraints in (("chosen", ()), ("without", _WITHOUT)):
        started = time.perf_counter()
        frontier = sw.search(graph, machine, constraints=constraints)
        row: dict[str, Any] = {"search_seconds": time.perf_counter() - started}
        try:
            best = frontier.fastest("80GiB")
            row |= {"step_seconds": best.step_seconds, "peak_bytes": best.peak_bytes}
            row |= {"attention": attention_of(best), "splits_sequence": splits_sequence(best)}
        except InfeasibleError as e:
            row |= {"infeasible": str(e)}
        smallest = frontier.smallest()
        row |= {"smallest_bytes": smallest.peak_bytes, "fastest_seconds": frontier[0].step_seconds}
        row |= {"fastest_attention": attention_of(frontier[0])}
        found[name] = row
        print(name, row, flush=True)
    return found


def speed(rounds: int, devices: int = 2) -> dict[str, Any]:
    """Step times of the plan chosen and of the best without the split, on local ranks."""
    model, batch = for_speed()
    graph, machine = sw.capture(model, (), batch), sw.Machine.preset(f"{devices}xcpu")
    plans = [
        sw.search(graph, machine, constraints=constraints).fastest()
        for constraints in ((), _WITHOUT)
    ]
    texts = [one.to_json() for one in plans]
    measured = _ranks(devices, _timed, texts, rounds, load=True)
    ratios = [a / b for a, b in zip(*measured, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    found: dict[str, Any] = {"tokens": batch["input_ids"].shape[1], "rounds": rounds}
    for name, one, seconds in zip(("chosen", "without"), plans, measured, strict=True):
        found[name] = {
            "attention": attention_of(one),
            "predicted_seconds": one.step_seconds,
            "seconds": statistics.median(seconds),
        }
    found |= {"ratio": middle, "ratio_quartiles": [low, high]}
    print(found, flush=True)
    return found


def _timed(rank: int, store: str, texts: Sequence[str], rounds: int) -> None:
    modules, optimizers = [], []
    for text in texts:
        module, batch = for_speed()
        modules.append(sw.parallelize(module, sw.Plan.from_json(text)))
        optimizers.append(torch.optim.AdamW(modules[-1].parameters(), lr=1e-3))
    steps = list(zip(modules, optimizers, strict=True))
    found = torch.zeros(len(steps), rounds, dtype=torch.float64)
    for number in range(-1, rounds):  # the first round is for nothing
        losses = {}
        for place in range(len(steps)) if number % 2 else reversed(range(len(steps))):
            module, optimizer = steps[place]
            dist.barrier()
            started = time.perf_counter()
            losses[place] = float(module.train_step(optimizer, batch))
            found[place, number] = time.perf_counter() - started
        if abs(losses[0] - losses[1]) > _ALIKE * abs(losses[1]):
            raise RuntimeError(f"losses differ: {losses}")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(found.tolist(), Path(store).with_suffix(".result"))


def _ranks(devices: int, function: Any, *given: Any, load: bool = False) -> Any:
    """What rank 0 of some processes left, that each ran `function`."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        spawn(_rank, (devices, str(store), function, given), nprocs=devices)
        result = store.with_suffix(".result")
        return torch.load(result, weights_only=True) if load else result.read_text()


def _rank(rank: int, devices: int, store: str, function: Any, given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=devices)
    try:
        function(rank, store, *given)
        dist.barrier()  # none leaves while another still sends
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measure what is asked for, and write it over what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": memory,
        "plan": plan,
        "speed": lambda: speed(options.rounds),
    }
    result = {name: parts[name]() for name in options.only}
    record.write(result, options.output, SEED)


if __name__ == "__main__":
    main()
