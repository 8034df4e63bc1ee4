"""Step programs of all groups of a pipeline, played: bubbles by formula, links, and who waits."""

from functools import cache

import pytest
import torch
from torch import nn

from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import Pipeline
from shardwright.program.decisions import Decisions
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.lower.stages import splits_backward
from shardwright.program.step.lower.pipeline import lower_pipeline
from shardwright.program.step.optimize import optimized
from shardwright.rules.analysis import analyze
from shardwright.simulate.time.pipelines import StageTime, step_seconds
from shardwright.simulate.time.stages import group_names, simulated_stages
from shardwright.simulate.time.step_program import OpSeconds, StepPrices, TransferSeconds
from shardwright.tracing.capture import capture_call

LAYERS = 8


class Chain(nn.Module):
    """Equal layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))

    def forward(self, x):
        return self.layers(x).square().sum()


@cache
def chain():
    graph = capture_call(Chain(), (), {"x": torch.zeros(40, 4)}).graph
    return graph, analyze(graph)


def prices(way=0.0, **further):
    """A layer takes 1 s forward and 2 s backward, a message `way`."""
    graph, _ = chain()
    ops = {
        op.name: OpSeconds(1.0, 2.0, op.source.module) for op in graph.ops if len(op.operands) == 2
    }
    assert len(ops) == LAYERS
    given = {"links": {"dp": "dp"}, "message": lambda _one: way} | further
    return StepPrices(ops, lambda _one: TransferSeconds(0.0), lambda *_: 1.0, **given)


@cache
def staged(schedule, groups, stages, count):
    graph, analysis = chain()
    mesh = Mesh.parse("dp=1")
    layers = [op.name for op in graph.ops if len(op.operands) == 2]
    cuts = tuple(layers[i * LAYERS // stages] for i in range(1, stages))
    tilings = {op.name: (None,) for op in graph.ops}
    storage = {name: Layout.replicated(mesh) for name in graph.trained}
    pipeline = Pipeline(cuts, schedule, groups)
    return StagedGraph(
        graph, analysis, Decisions(mesh, tilings, storage, frozenset(), {}, count, pipeline)
    )


def played(schedule, groups, stages, count, way=0.0):
    one = staged(schedule, groups, stages, count)
    programs = [optimized(lower_pipeline(one, rank)) for rank in range(groups)]
    names = group_names(one.pipeline.homes, 1)
    return simulated_stages(programs, [prices(way)] * groups, names)


SINGLE = [("GPipe", 4, 4, 8), ("1F1B", 4, 4, 8), ("1F1B", 2, 2, 5), ("GPipe", 2, 2, 1)]
SEVERAL = [("Interleaved1F1B", 4, 8, 8), ("LoopedBFS", 2, 8, 4), ("Interleaved1F1B", 2, 4, 4)]


@pytest.mark.parametrize("schedule, groups, stages, count", SINGLE + SEVERAL)
def test_the_bubble_is_that_of_the_formula(schedule, groups, stages, count):
    """M t + (P - 1) t, a vth of the bubble where groups have v stages (Megatron-LM)."""
    each = 3.0 * LAYERS / groups
    bubble = (groups - 1) * each * groups / stages
    found = played(schedule, groups, stages, count).seconds
    assert found == pytest.approx(count * each + bubble)


@pytest.mark.parametrize("way", [0.0, 0.25])
@pytest.mark.parametrize(
    "schedule, groups, stages, count",
    [*SINGLE, ("InterleavedZeroBubble", 4, 4, 8), ("ZBVZeroBubble", 2, 4, 8)],
)
def test_a_step_is_as_long_as_the_sweep_over_passes_says(schedule, groups, stages, count, way):
    """Which knows passes and messages, but no instructions."""
    one = staged(schedule, groups, stages, count)
    moved = [a != b for a, b in zip((-1, *one.pipeline.homes), one.pipeline.homes, strict=False)]
    seconds = 3.0 * LAYERS / stages
    times = [
        StageTime(seconds, 0.0, way * (stage > 0) * moved[stage], splits_backward(part))
        for stage, part in enumerate(one.parts)
    ]
    expected = step_seconds(schedule, times, count, groups)
    assert played(schedule, groups, stages, count, way).seconds == pytest.approx(expected)
