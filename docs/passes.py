"""What each pass of a step program changes: its diff, on plans of a model of two layers.

Run it (`python docs/passes.py`): it prints one diff for each pass, and for the passes that the
first plan does not need, of a plan that does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

import shardwright as sw
from shardwright.ir.graph import Graph
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.rank_steps import passes_named, step_program
from shardwright.rules.analysis import analyze


class Block(nn.Module):
    """hidden [batch, 8] -> hidden [batch, 8]: one layer, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.relu(self.linear(hidden))


class Model(nn.Module):
    """x [batch, 8] -> equal layers -> loss: a mean over labels that are not ignored."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(x, target)


SHARDED = "dp_shard=2"
FEW = "overlap_sums,bucket,fuse"
# Pass, plan, and the passes before it. The first plan has those that most plans need.
CASES = (
    ("overlap_sums", SHARDED, ""),
    ("bucket", SHARDED, "overlap_sums"),
    ("fuse", SHARDED, "overlap_sums,bucket"),
    ("late_results", "dp_replicate=2", FEW),
    ("delay_waits", SHARDED, f"{FEW},late_results"),
    ("free", SHARDED, f"{FEW},late_results,delay_waits"),
    ("prefetch", SHARDED, "overlap_sums"),
    ("accumulate", "dp_replicate=2 mb=3", FEW),
    ("receive_early", "pp=2 mb=2", FEW),
    ("fetch_read", "dp_replicate=2 offload=optimizer,parameters", "overlap_sums,bucket"),
    ("fetch_gathered", f"{SHARDED} offload=optimizer,parameters", FEW),
    ("overlap_stores", "dp_replicate=2 offload=optimizer,parameters", "overlap_sums"),
    ("overlap_copies", "dp_replicate=2 ac=full offload=activations", FEW),
    ("separate_gathers", SHARDED, "overlap_sums,prefetch,delay_waits"),
)


def stages() -> Iterator[tuple[str, str]]:
    """Name of each pass, and what it changes: lines of the program before and after it."""
    batch = torch.randn(96, 8), torch.randint(0, 4, (96,))
    graph = sw.capture(Model(2), batch)
    for name, strategy, before in CASES:
        if name == "overlap_copies":  # what the first and the last layer read stays on the device
            graph = sw.capture(Model(3), batch)
        yield name.replace("_", " "), _change(graph, name, strategy, before)


def _change(graph: Graph, name: str, strategy: str, before: str) -> str:
    analysis = analyze(graph)
    plan = replace(sw.price(graph, "2xcpu", strategy), separates_gathers=name == "separate_gathers")
    decisions = read_plan(plan, graph, analysis)
    rank = 0 if decisions.pipeline is None else decisions.pipeline.groups - 1
    texts: list[Sequence[str]] = []
    for passes in (before or "naive", f"{before},{name}" if before else name):
        program = step_program(graph, analysis, decisions, rank, passes_named(passes))
        texts.append(str(program).splitlines())
    headers = f"rank {rank} of {strategy}: {before or 'naive'}", f"... and {name}"
    changed = list(difflib.unified_diff(*texts, *headers, lineterm="", n=1))
    assert changed, f"{name} changes nothing of {strategy}"
    return "\n".join("@@" if line.startswith("@@") else line for line in changed)


if __name__ == "__main__":
    for stage, text in stages():
        print(f"== {stage}\n{text}\n")
