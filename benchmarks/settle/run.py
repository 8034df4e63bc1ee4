"""Processor seconds to find the time and memory of one plan, by number of layers and strategy.

    python -m benchmarks.settle.run -o benchmarks/settle/result.json

Llama-8B of 4, 32 and 128 layers on 8 H100s, captured on the meta device. `compared` is what a
search does with each candidate: with many equal layers its costs follow from few of them.
`again` is the same for a plan whose few layers are those of a plan before, and so lowered and
their memory simulated. `settled` is what a search does with the plan that it returns: all layers
are lowered and simulated, and of pipelines few micro-batches. Medians, without Python's cyclic
garbage collector, as in a search; the first plan of a graph, whose layers are found once, is not
counted. Both must find equal costs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.search.models import llama
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.simulated.folded_costs import KEPT
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.tracing.op_memory.footprints import Footprints

SEED = 0
MACHINE = "8xH100"
LAYERS = (4, 32, 128)
STRATEGIES = {
    "data parallel": "dp_replicate=8",
    "fully sharded": "dp_shard=8",
    "tensor parallel": "tp=8",
    "sharded x tensor parallel": "dp_shard=4 tp=2",
    "full recomputation": "dp_shard=8 ac=full",
    "8 micro-batches": "dp_shard=8 mb=8",
    "tensor parallel, 8 micro-batches": "dp_shard=2 tp=4 mb=8",
    "2 stages, 8 micro-batches": "pp=2 dp_shard=4 mb=8",
    "4 stages, 32 micro-batches": "pp=4 dp_shard=2 mb=32",
}
RATIO, SECONDS = 1.3, 0.05  # aimed at: of the most layers to the fewest, and of one plan
_PATIENCE = 2.0  # seconds after which a measurement is not repeated


def rows(layers: Sequence[int], repeats: int, wanted: Sequence[str]) -> dict[str, Any]:
    """The results of every strategy, by number of layers."""
    found: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    for count in layers:
        with torch.device("meta"):
            model, batch = llama(count)
        graph, machine = sw.capture(model, (), batch), sw.Machine.preset(MACHINE)
        expansion = Expansion(graph, machine, "adamw")
        tracer = Footprints(on_cpu=False)
        given = graph, machine, "adamw", tracer, expansion.sources.analysis
        for name in wanted:
            plan = expansion.expanded(Strategy.parse(STRATEGIES[name])).plan(0.0, ())
            found[name][str(count)] = row = measured(plan, partial(Refinement, *given), repeats)
            print(f"{name}, {count} layers: {row}", flush=True)
    return found


def measured(plan: Plan, made: Callable[[int], Refinement], repeats: int) -> dict[str, Any]:
    """Seconds by either way, and whether both find the same costs."""
    found: list[Plan] = []
    seconds: list[float] = []
    for kept in (0, KEPT):
        refinement = made(kept)
        refinement.compared(plan)
        compared, median = _median(repeats, partial(_compared, refinement, plan))
        found.append(compared)
        seconds.append(median)
    settled, whole = found[0], seconds[0]
    if settled.timeline is None:
        settled, whole = _median(repeats, lambda: refinement.settled(replace(plan)))
    return {
        "compared_seconds": seconds[0],
        "again_seconds": seconds[1],
        "settled_seconds": whole,
        "from_few_layers": found[0].timeline is None,
        "equal": all(
            math.isclose(one.step_seconds, settled.step_seconds, rel_tol=1e-9)
            and one.peak_bytes == settled.peak_bytes
            for one in found
        ),
    }


def _compared(refinement: Refinement, plan: Plan) -> Plan:
    return refinement.compared(replace(plan))


def _median(repeats: int, run: Callable[[], Plan]) -> tuple[Plan, float]:
    """What `run` returns, and its processor seconds."""
    seconds: list[float] = []
    while True:
        with paused():
            start = time.process_time()
            found = run()
            seconds.append(time.process_time() - start)
        if len(seconds) == repeats or sum(seconds) > _PATIENCE:
            return found, statistics.median(seconds)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--out", type=Path, help="where the result is written, as JSON")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    found = rows(args.layers, args.repeats, args.strategies)
    result = {
        "machine planned for": MACHINE,
        "layers": args.layers,
        "aims": {"ratio": RATIO, "seconds": SECONDS},
        "rows": found,
    }
    if args.out is not None:
        record.write(result, args.out, SEED)


if __name__ == "__main__":
    main()
