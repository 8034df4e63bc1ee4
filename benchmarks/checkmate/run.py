"""Searched plans against Checkmate's optimum, on GPT-2 of five layers and one device.

    python -m benchmarks.checkmate.run -o benchmarks/checkmate/result.json

GPT-2 with 8 sequences of 1024 and without dropout, as published, and with a vocabulary of 2,048, so
that the logits do not hide what layers hold while they run again. The plans of an exact search are
converted to schedules of Checkmate's training graph (`training_graph.py`, `plans.py`). At ten
limits, evenly spaced from the least memory of these schedules to that of the step that recomputes
nothing, the fastest schedule that fits is compared with the least time of any schedule in
Checkmate's stages, which HiGHS finds (`relaxation.py`); and so is the fastest that fits if the last
nodes that run again, as many as is best, run once. The printed lower bound of a plan is
compared with Checkmate's optimum within the plan's own memory. `--paper-minutes` gives HiGHS the
paper's own program, too.

A result of this commit is continued: limits that it has are not solved again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.checkmate.paper_program import paper_program
from benchmarks.checkmate.plans import priced, schedule_of_plan, with_last_end_once
from benchmarks.checkmate.relaxation import optimum
from benchmarks.checkmate.schedule import Schedule
from benchmarks.checkmate.training_graph import TrainingGraph
from shardwright.ir.graph import Graph
from shardwright.ir.plan import Plan

SEED = 0
MACHINE, LIMITS = "1xH100", 10
LAYERS, BATCH, LENGTH = 5, 8, 1024
VOCABULARIES = {"GPT-2": 50257, "GPT-2, vocabulary of 2,048": 2048}


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan and its schedule."""

    plan: Plan
    schedule: Schedule

    @property
    def least_seconds(self) -> float:
        """The printed lower bound, without the update."""
        return self.plan.lower_bound_seconds - sum(one.seconds for one in self.plan.parameters)


def gpt2(vocabulary: int) -> Graph:
    """The captured step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_positions=LENGTH, vocab_size=vocabulary, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    return sw.capture(model, (), {"input_ids": ids, "labels": ids})


def searched(graph: Graph, nodes: TrainingGraph) -> list[Planned]:
    """The plans of a search on one device, in one micro-batch, with the whole loss."""
    frontier = sw.search(
        graph, MACHINE, exact=True, memory_limit="unlimited", offload=False,
        micro_batches=(1,), loss_chunks=(1,), mlp_chunks=(1,), stages=(1,),
    )  # fmt: skip
    return [Planned(plan, schedule_of_plan(nodes, plan)) for plan in frontier]


def compared(
    nodes: TrainingGraph, plans: Sequence[Planned], limit: int, minutes: float, paper: float
) -> dict[str, Any]:
    """The fastest plan within a limit beside Checkmate's optimum."""
    start = time.process_time()
    ours = min((p for p in plans if p.schedule.peak <= limit), key=lambda p: p.schedule.seconds)
    best = optimum(nodes, limit, 60 * minutes)
    ends = (one for p in plans for one in with_last_end_once(nodes, p.schedule))
    fitting = (one.seconds for one in ends if one.peak <= limit)
    within = optimum(nodes, ours.schedule.peak, 60 * minutes)
    row: dict[str, Any] = {
        "limit": limit,
        "ours": {"seconds": ours.schedule.seconds, "bytes": ours.schedule.peak},
        "end_once": min([ours.schedule.seconds, *fitting]),
        "bound": best.bound,
        "optimal": best.schedule is not None,
        "programs": best.rounds,
        "cuts": len(best.cuts),
        "planned": {
            "bytes": ours.plan.peak_bytes,
            "printed_bound": ours.least_seconds,
            "bound_within_its_bytes": within.bound,
        },
    }
    if paper:
        found = paper_program(nodes, limit).solved(60 * paper)
        least = max(found.bound, nodes.least_seconds)  # HiGHS may know no bound yet
        row["paper"] = {"minutes": paper, "bound": least, "proven": found.proven}
    return row | {"processor_seconds": time.process_time() - start}


def measured(
    name: str, known: dict[str, Any], minutes: float, paper: float
) -> Iterator[dict[str, Any]]:
    """The result of one model after each limit; those that are `known` are not solved again."""
    graph = gpt2(VOCABULARIES[name])
    nodes = priced(graph, sw.Machine.preset(MACHINE))
    plans = searched(graph, nodes)
    if broken := [error for one in plans if (error := one.schedule.error())]:
        raise SystemExit(f"{name}: a plan is no schedule of the paper: {broken[0]}")
    least, most = (f(one.schedule.peak for one in plans) for f in (min, max))
    rows = {row["limit"]: row for row in known.get("rows", ())}
    limits = [least + (most - least) * i // (LIMITS - 1) for i in range(LIMITS)]
    for number, limit in enumerate(limits, 1):
        if limit not in rows:
            rows[limit] = compared(nodes, plans, limit, minutes, paper)
        print(name, rows[limit], flush=True)
        yield {
            "operators": len(graph.ops),
            "nodes": len(nodes),
            "forward_nodes": nodes.forward,
            "least_seconds": nodes.least_seconds,
            "plans": len(plans),
            "rows": [rows[one] for one in limits[:number]],
        }


def main() -> None:
    """Compare and write the result after each limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--minutes-per-budget", type=float, default=60.0)
    parser.add_argument("--paper-minutes", type=float, default=0.0)
    parser.add_argument(
        "--models", nargs="*", default=list(VOCABULARIES), choices=list(VOCABULARIES)
    )
    args = parser.parse_args()
    models = _known(args.output)
    for name in args.models:
        known = models.get(name, {})
        for found in measured(name, known, args.minutes_per_budget, args.paper_minutes):
            models[name] = found
            if args.output:
                record.write({"planned for": MACHINE, "models": models}, args.output, SEED)


def _known(path: Path | None) -> dict[str, Any]:
    """The models of a result at this commit, if there is one."""
    if path is None or not path.exists():
        return {}
    result = json.loads(path.read_text())
    return dict(result["models"]) if result["commit"] == record.commit() else {}


if __name__ == "__main__":
    main()
