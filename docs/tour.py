"""The idea of shardwright in one sitting: every layer of the package, on a model of two layers.

Run it (`python docs/tour.py`): it prints each stage and checks what it says.
No GPU and no process group is needed until the very last step, which is left to
`examples/` and `shardwright run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

import shardwright as sw
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import Pipeline
from shardwright.planner.baselines import baselines
from shardwright.planner.space.space import make_space
from shardwright.planner.tables.model import CostModel
from shardwright.program.decisions import Decisions
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.lower.rank_program import lower
from shardwright.program.step.async_pipeline.stage_programs import stage_programs
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.pipelines.pipeline import lower_pipeline
from shardwright.program.step.optimize import optimized
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.rule import Split


class Model(nn.Module):
    """x [batch, 8] -> hidden [batch, 16] -> scores [batch, 4], with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = self.down(torch.relu(self.up(x)))
        return nn.functional.cross_entropy(scores, target)


def split_batch(graph: Graph, analysis: Analysis) -> dict[str, tuple[Split | None]]:
    """The tilings that split the batch of 6 along the only axis of a mesh."""
    tilings: dict[str, tuple[Split | None]] = {}
    for op in graph.ops:
        batch = [factor.name for factor in analysis.rules[op.name].factors if factor.size == 6]
        tilings[op.name] = (Split(batch[0]) if batch else None,)
    return tilings


def fully_sharded(graph: Graph, analysis: Analysis) -> Decisions:
    """The batch split over two devices, and every parameter stored in two parts."""
    mesh = Mesh((("dp", 2),))
    parameters = graph.leaves_of(LeafKind.PARAMETER)
    storage = {leaf.name: Layout.parse("dp:S(0)", mesh) for leaf in parameters}
    return Decisions(mesh, split_batch(graph, analysis), storage)


def stages() -> Iterator[tuple[str, str]]:
    """Name and printed text of every stage that the model travels through."""
    # tracing: one call of the unmodified module becomes a graph. The mean of the
    # loss has become a sum and a count, because the mean of means is not the mean.
    x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))
    graph = sw.capture(Model(), (x, target))
    yield "graph", str(graph)

    # rules: every operator in index notation. Equal dimensions have been unified.
    analysis = analyze(graph)
    yield "rules", "\n".join(f"{op.name:20} {analysis.rules[op.name]}" for op in graph.ops)

    # Splitting one factor says where everything lies, forward and backward.
    rule = analysis.rules["linear_1"]
    lines = []
    for choice in (Split("b0"), Split("n"), Split("k")):
        placed = rule.axis_placements(choice)
        operands = " ".join(str(p) for p in placed.operands)
        grads = " ".join(str(p) for p in placed.operand_grads)
        lines.append(f"{choice}: {operands} -> {placed.results[0]}; gradients {grads}")
    yield "tilings", "\n".join(lines)

    # planner.tables: tables of seconds and bytes over the tilings of every operator.
    machine = sw.Machine.preset("2xH100")
    mesh = Mesh((("tp", 2),))
    model = CostModel(graph, analysis, machine, mesh)
    space = make_space(model)
    nodes = zip(space.problem.nodes, space.problem.sizes, strict=True)
    yield "space", "\n".join(f"{node.name:20} {size} choices" for node, size in nodes)

    # solve: the Pareto frontier of step time and memory. For a model this small the
    # fastest plan is to compute everything everywhere; the smallest is another matter.
    frontier = sw.search(graph, machine)
    assert frontier[0].step_seconds == min(plan.step_seconds for plan in frontier)
    yield "frontier", "\n".join(str(plan) for plan in frontier)

    # program: what rank 1 runs under Megatron's plan. The first layer is split by its
    # outputs, the second by its inputs, and the partial sums are reduced once.
    assignment = dict(baselines(space))["tensor parallel"]
    decisions = Decisions(mesh, space.tilings(assignment), space.storage(assignment))
    program = lower(graph, analysis, decisions, 1)
    yield "program", str(program)

    # The whole step of rank 0 in two micro-batches, parameters sharded, before and after passes.
    decisions = fully_sharded(graph, analysis)
    step = micro_batched_step(graph, analysis, micro_batches(graph, analysis, 2), decisions, 0)
    naive = lower_step(step)
    yield "naive step", str(naive)
    yield "step", str(optimized(naive))

    # The same step as a pipeline: the second layer and the loss are a stage of their own.
    mesh_of_one = Mesh((("dp", 1),))
    parameters = graph.leaves_of(LeafKind.PARAMETER)
    pipeline = Decisions(
        mesh_of_one,
        {op.name: (None,) for op in graph.ops},
        {leaf.name: Layout.replicated(mesh_of_one) for leaf in parameters},
        micro_batches=2,
        pipeline=Pipeline(("linear_1",), "1F1B", 2),
    )
    staged = StagedGraph(graph, analysis, pipeline)
    yield "pipeline step", "\n\n".join(str(optimized(lower_pipeline(staged, i))) for i in range(2))

    # Without flushes: a call of each group trains on, with weights that SpecTrain predicts.
    endless = replace(
        pipeline, micro_batches=1, pipeline=Pipeline(("linear_1",), "async spectrain", 2)
    )
    staged = StagedGraph(graph, analysis, endless)
    calls = (stage_programs(staged, rank).call for rank in range(2))
    yield "asynchronous call", "\n\n".join(map(str, calls))

    # The same machinery gives data parallelism: another split, and the gradients are reduced.
    storage = {leaf.name: Layout.replicated(mesh) for leaf in parameters}
    decisions = Decisions(mesh, split_batch(graph, analysis), storage)
    data_parallel = lower(graph, analysis, decisions, 1)
    reduced = [line for line in str(data_parallel).splitlines() if "gradient tp:P" in line]
    assert len(reduced) == len(parameters)
    yield "reduced gradients", "\n".join(reduced)


if __name__ == "__main__":
    for name, text in stages():
        print(f"== {name}\n{text}\n")
