"""Published models on many devices, by the cost model: what splitting sequence or experts is worth.

    python -m benchmarks.wide.planned -o benchmarks/wide/planned.json

The fastest plan that fits is searched with all there is and with the split forbidden; the lower
bound of the second search is what every plan without the split takes at least. Models that the
file has of this commit are kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as sw
from benchmarks import record
from benchmarks.wide.models import SEED, Built, llama_8b, mixtral_8x7b
from benchmarks.wide.plans import both, fastest

MACHINE = "8x8xH100"
MODELS: dict[str, tuple[Callable[[], Built], tuple[str, ...]]] = {  # and the words of the split
    "Llama-3-8B": (llama_8b, ("sequence",)),
    "Mixtral-8x7B": (mixtral_8x7b, ("experts",)),
}


def row(name: str) -> dict[str, Any]:
    """The fastest plans of a model with the split and without, within the devices' memory."""
    make, words = MODELS[name]
    model, given = make()
    batch, length = given["input_ids"].shape
    graph, machine = sw.capture(model, (), given), sw.Machine.preset(MACHINE)
    limit = int(machine.device.memory_bytes)
    start = time.process_time()
    every, rest = both(graph, machine, words)
    spent = time.process_time() - start
    return {
        "model": name,
        "split": words[0],
        "commit": record.commit(),
        "batch": batch,
        "length": length,
        "memory_limit": limit,
        "expert_skew": machine.expert_skew,
        "searches_cpu_seconds": spent,
        "chosen": fastest(every, limit, words),
        "without": fastest(rest, limit, words),
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
