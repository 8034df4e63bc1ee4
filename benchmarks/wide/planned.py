"""Published models on many devices, by the cost model: what splitting sequence or experts is worth.

    python -m benchmarks.wide.planned -o benchmarks/wide/planned.json

The fastest plan that fits is searched with all there is and with the split forbidden; the lower
bound of the second search is what every plan without the split takes at least. Where the fastest
plan does without, the fastest that has the split is searched too. Models that the file has of this
commit are kept.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as sw
from benchmarks import record
from benchmarks.wide.models import SEED, Built, llama_8b, mixtral_8x7b
from benchmarks.wide.plans import both, fastest

MACHINE = "8x8xH100"
AXES = ("dp", "tp")
# A model, the words of the split, what is to be split and how.
MODELS: dict[str, tuple[Callable[[], Built], tuple[str, ...], str, str]] = {
    "Llama-3-8B": (llama_8b, ("sequence",), "*.self_attn", "sequence|sequence (halves)"),
    "Mixtral-8x7B": (mixtral_8x7b, ("experts",), "*.experts", "experts (sum)|batch to experts"),
}


def row(name: str) -> dict[str, Any]:
    """The fastest plans of a model with the split and without, within the devices' memory."""
    make, words, glob, ways = MODELS[name]
    model, given = make()
    batch, length = given["input_ids"].shape
    graph, machine = sw.capture(model, (), given), sw.Machine.preset(MACHINE)
    limit = int(machine.device.memory_bytes)
    start = time.process_time()
    every, rest = both(graph, machine, words)
    spent = time.process_time() - start
    chosen = fastest(every, limit, words)
    more: dict[str, Any] = {}
    if not chosen.get("splits"):
        pins = (f"pin {glob}={axis}:{ways}" for axis in AXES)
        forced = [sw.search(graph, machine, constraints=[pin]) for pin in pins]
        found = [fastest(frontier, limit, words) for frontier in forced]
        more["forced"] = min(found, key=lambda one: one.get("step_seconds", math.inf))
    return {
        "model": name,
        "split": words[0],
        "commit": record.commit(),
        "batch": batch,
        "length": length,
        "memory_limit": limit,
        "expert_skew": machine.expert_skew,
        "searches_cpu_seconds": spent,
        "chosen": chosen,
        "without": fastest(rest, limit, words),
        **more,
    }


def main() -> None:
    """Plan, print a line each, write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--fresh", action="store_true", help="plan again what the file has")
    options = parser.parse_args()
    kept = [] if options.fresh else record.rows_of_this_commit(options.output)
    for name in options.models:
        if name in {one["model"] for one in kept}:
            continue
        found = row(name)
        print(found, flush=True)
        kept.append(found)
        record.write({"planned_for": MACHINE, "rows": kept}, options.output, SEED)


if __name__ == "__main__":
    main()
