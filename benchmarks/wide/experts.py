"""What splitting experts and vocabularies is worth: by the cost model, and on local ranks.

    python -m benchmarks.wide.experts -o benchmarks/wide/experts.json
    python -m benchmarks.wide.experts --published -o build/published.json

Mixtral-8x7B as published is searched on 8x8xH100 with all there is and with the splits of
experts forbidden; the lower bound of the second search is what every plan without them takes at
least. Small models are planned for two local ranks, for speed and under tighter limits of memory.
Where the chosen plan splits what is asked about it runs beside the best plan that does not, a step
of each in turn, in pairs whose order changes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import shardwright as sw
from benchmarks import record
from shardwright.ir.frontier import InfeasibleError

SEED, RANKS = 0, 2
PUBLISHED = "8x8xH100"
LIMITS = (1.0, 0.8, 0.65)  # of what the fastest plan needs
_ALIKE = 1e-4  # how far losses may be apart, relatively
Made = tuple[torch.nn.Module, dict[str, Any]]


def published(batch: int, length: int) -> Made:
    """Mixtral-8x7B's shape in bfloat16, on the meta device."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros((batch, length), dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def mixtral() -> Made:
    """Two layers of eight experts that are most of the model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config), _tokens(512, 4, 128)


def wordy() -> Made:
    """One layer under a vocabulary that is most of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32001, hidden_size=192, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(32001, 4, 64)


MODELS: dict[str, tuple[Callable[[], Made], tuple[str, ...]]] = {  # and the words of the split
    "experts": (mixtral, ("experts",)),
    "vocabulary": (wordy, ("vocabulary", "classes")),
}


def _tokens(words: int, batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(words, (batch, length))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def splits(plan: sw.Plan, words: Sequence[str]) -> list[str]:
    """How the plan's operators split what the `words` mean, each way once."""
    found = {s for op in plan.ops for s in op.splits if any(word in s for word in words)}
    return sorted(found)


def without(words: Sequence[str]) -> list[str]:
    """Constraints that leave these splits out."""
    return [f"forbid *=*:{word}" for word in words]


def compare_published(batch: int, length: int) -> dict[str, Any]:
    """The fastest plans with and without split experts, within the memory of the devices."""
    model, given = published(batch, length)
    graph, machine = sw.capture(model, (), given), sw.Machine.preset(PUBLISHED)
    start = time.process_time()
    every = sw.search(graph, machine)
    spent = time.process_time() - start
    limit = machine.device.memory_bytes
    best = every.fastest(limit)
    rest = sw.search(graph, machine, constraints=without(("experts",)))
    row = {
        "model": "Mixtral-8x7B", "machine": PUBLISHED, "batch": batch, "length": length,
        "search_cpu_seconds": spent, "memory_limit": limit, "expert_skew": machine.expert_skew,
        "with": _line(best, ("experts",)), "explain": best.explain().splitlines()[:20],
    }  # fmt: skip
    try:
        other = rest.fastest(limit)
        row["without"] = _line(other, ("experts",)) | {"at_least": other.lower_bound_seconds}
    except InfeasibleError as e:
        row["without"] = {"infeasible": str(e)}
    return row


def _line(plan: sw.Plan, words: Sequence[str]) -> dict[str, Any]:
    return {
        "mesh": str(plan.mesh),
        "step_seconds": plan.step_seconds,
        "peak_bytes": plan.peak_bytes,
        "splits": splits(plan, words),
    }


def compare_local(name: str, machine: sw.Machine, rounds: int) -> list[dict[str, Any]]:
    """Of each memory limit the chosen plan beside the best one without the split, if it splits."""
    make, words = MODELS[name]
    torch.manual_seed(SEED)
    model, batch = make()
    graph = sw.capture(model, (), batch)
    every, rest = sw.search(graph, machine), sw.search(graph, machine, constraints=without(words))
    most = every.fastest().peak_bytes
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for part in LIMITS:
        limit = int(part * most)
        row: dict[str, Any] = {"model": name, "memory_limit": limit}
        try:
            chosen = every.fastest(limit)
            row["chosen"] = _line(chosen, words)
            other = rest.fastest(limit)
            row["other"] = _line(other, words)
        except InfeasibleError as e:
            rows.append(row | {"infeasible": str(e)})
            continue
        key = chosen.to_json() + other.to_json()
        if row["chosen"]["splits"] and key not in seen:
            seen.add(key)
            row["measured"] = _measured(name, (chosen, other), rounds)
        rows.append(row)
    return rows


def _measured(name: str, plans: Sequence[sw.Plan], rounds: int) -> dict[str, Any]:
    texts = [plan.to_json() for plan in plans]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        spawn(_rank, (str(store), name, texts, rounds), nprocs=RANKS)
        found = torch.load(store.with_suffix(".measured"), weights_only=True)
    chosen, other = found
    ratios = [a / b for a, b in zip(chosen, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "rounds": rounds,
        "chosen_seconds": statistics.median(chosen),
        "other_seconds": statistics.median(other),
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def _rank(rank: int, store: str, name: str, texts: Sequence[str], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        steps = [_stepper(name, text) for text in texts]
        for _ in range(3):
            first, second = (float(step()) for step in steps)
            if abs(first - second) > _ALIKE * abs(first):
                raise RuntimeError(f"losses differ: {first} and {second}")
        seconds = torch.zeros(len(steps), rounds, dtype=torch.float64)
        for number in range(rounds):
            for place in range(len(steps)) if number % 2 else reversed(range(len(steps))):
                dist.barrier()
                start = time.perf_counter()
                steps[place]()
                seconds[place, number] = time.perf_counter() - start
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if rank == 0:
            torch.save(seconds.tolist(), Path(store).with_suffix(".measured"))
        dist.barrier()  # none leaves while another still sends
    finally:
        dist.destroy_process_group()


def _stepper(name: str, text: str) -> Callable[[], Tensor]:
    torch.manual_seed(SEED)
    model, batch = MODELS[name][0]()
    parallel = sw.parallelize(model, sw.Plan.from_json(text))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, foreach=True)
    return lambda: parallel.train_step(optimizer, batch)


def main() -> None:
    """Compare, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--published", action="store_true", help="nothing on local ranks")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    row = compare_published(options.batch, options.length)
    print(row["with"], row["without"], f"{row['search_cpu_seconds']:.1f} CPU s", flush=True)
    result: dict[str, Any] = {"published": row, "local": []}
    if not options.published:
        machine = sw.Machine.measure(RANKS)
        for name in MODELS:
            for found in compare_local(name, machine, options.rounds):
                result["local"].append(found)
                print(found, flush=True)
        result["machine_file"] = machine.to_toml()
    record.write(result, options.output, SEED)


if __name__ == "__main__":
    main()
