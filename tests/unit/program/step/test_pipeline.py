"""Pipelines as step programs: programs of all ranks fit together, under every schedule."""

import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline, stage_mesh
from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.program.decisions import Decisions
from shardwright.program.lower.balance import balanced_cuts, operator_work
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.dead_code import forward_only
from shardwright.program.step.optimize import PASSES, optimized
from shardwright.program.step.order import check_order
from shardwright.program.step.pipeline import lower_pipeline
from shardwright.program.step.verify import verify
from shardwright.rules.analysis import analyze
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.placements import feasible, layouts_under, tilings
from shardwright.tracing.capture import capture_call
from tests.ranks.test_random_tilings import stored_as

SYNCHRONOUS = [name for name, one in SCHEDULES.items() if not one.asynchronous]


class Tied(nn.Module):
    """Eight layers between an embedding and a product with its weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(x @ self.embed.weight.T, labels)


@cache
def subject():
    torch.manual_seed(0)
    ids = torch.randint(12, (8,))
    graph = capture_call(Tied(), (), {"ids": ids, "labels": ids}).graph
    return graph, analyze(graph)


def staged(schedule, mesh, stages, count, seed=0):
    """The model in stages, every operator and parameter in any layout."""
    graph, analysis = subject()
    mesh, draw = Mesh.parse(mesh), random.Random(f"{schedule} {mesh} {stages} {count} {seed}")
    inner = stage_mesh(mesh)
    cuts = balanced_cuts(graph, stages, operator_work(graph, analysis))
    micro = micro_batches(graph, analysis, count) if count > 1 else None

    def fits(op, tiling):
        if micro is None:
            return True
        rule = analysis.rules[op.name]
        wide = micro.mesh(inner)
        return feasible(rule, layouts_under(rule, (micro.choices[op.name], *tiling), wide))

    chosen = {
        op.name: draw.choice(
            [one for one, _ in tilings(analysis.rules[op.name], inner) if fits(op, one)]
        )
        for op in graph.ops
    }
    storage = {
        leaf.name: draw.choice(stored_as(analysis.atoms[leaf.name], inner))
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
    }
    again = frozenset(key for key in storage if draw.random() < 0.5)
    pipeline = Pipeline(tuple(graph.ops[i].name for i in cuts), schedule, mesh.shape[0])
    decisions = Decisions(inner, chosen, storage, again, {}, count, pipeline)
    return StagedGraph(graph, analysis, decisions)


def programs(one, make=lambda program: program):
    ranks = one.pipeline.groups * one.decisions.mesh.size
    return [make(lower_pipeline(one, rank)) for rank in range(ranks)]


def stages_of(schedule, groups):
    each = SCHEDULES[schedule].stages_per_group
    return groups * (2 if each is None else each)


def cases():
    for schedule in SYNCHRONOUS:
        for mesh, groups in (("pp=2 dp=1", 2), ("pp=4 dp=1", 4), ("pp=2 dp=2", 2)):
            for count in (4, 8):
                stages = stages_of(schedule, groups)
                if count >= stages or not SCHEDULES[schedule].needs(groups, stages, count):
                    yield schedule, mesh, stages, count


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_programs_of_all_ranks_fit_together(case):
    one = staged(*case)
    naive = programs(one)
    check_order(naive)
    passed = [optimized(program) for program in naive]
    check_order(passed)
    evaluated = [forward_only(program) for program in passed]
    for program in evaluated:
        verify(program)
        assert not any(message.backward for message in program.messages())
    check_order(evaluated)
    for some in (PASSES[:2], PASSES[2:4]):
        check_order([optimized(program, some) for program in naive])
