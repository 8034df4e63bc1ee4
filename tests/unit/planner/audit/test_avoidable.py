"""Steps of small operators are limited by the host that issues them, and the answer says so."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.planner.audit.avoidable import NOTHING, avoidable
from shardwright.report.answer import answer_lines


def plans(width, machine):
    """The graph of an MLP, the frontier of its plans, and its fastest plan."""
    module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    with torch.device("meta"):
        batch = torch.zeros(width, width)
    graph = sw.capture(module.to("meta"), (batch,))
    frontier = sw.search(graph, machine)
    return graph, frontier, frontier.fastest()


@pytest.mark.parametrize("width, paced", [(64, True), (8192, False)])
def test_the_host_is_named_where_it_sets_the_pace(width, paced):
    machine = sw.Machine.preset("2xH100")
    graph, frontier, plan = plans(width, machine)
    found = avoidable(plan, graph, machine)
    limits = dict(answer_lines(plan, frontier.costs, None, avoidable=found))["limited by"]
    assert ("the host, which issues kernels" in limits) == paced
    alone = replace(machine, device=replace(machine.device, issue_seconds=0.0))
    assert avoidable(plan, graph, alone).host == 0.0


class Layers(nn.Module):
    """Four layers and a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_stages_share_the_parts_of_a_step():
    machine = sw.Machine.preset("2xH100")
    module = Layers()
    with torch.device("meta"):
        batch = torch.zeros(4096, 2048)
    graph = sw.capture(module.to("meta"), (batch,))
    frontier = sw.search(graph, machine, stages=(2,), micro_batches=(4,))
    plan = frontier.fastest()
    assert plan.pipeline.groups == 2
    found = avoidable(plan, graph, machine)
    limits = dict(answer_lines(plan, frontier.costs, None, avoidable=found))["limited by"]
    assert "hidden" not in limits
    assert 95 <= sum(map(int, re.findall(r"(\d+)%", limits))) <= 102
    assert "waiting for other stages" in limits


def test_parts_of_a_step_add_up_without_what_is_hidden():
    machine = sw.Machine.preset("2x2xH100")
    graph, frontier, _ = plans(8192, machine)
    plan = sw.price(graph, machine, "dp_shard=4")
    limits = dict(answer_lines(plan, frontier.costs, None))["limited by"]
    found = re.search(r"communication (\d+)% \((\d+)% hidden; most: ", limits)
    assert found is not None
    parts = map(int, re.findall(r"(\d+)%", limits))
    assert 97 <= sum(parts) - 2 * int(found[2]) <= 103


def test_the_loss_of_a_plan_may_be_in_chunks():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 512, bias=False)

        def forward(self, x, labels):
            return nn.functional.cross_entropy(self.head(x), labels)

    machine = sw.Machine.preset("2xH100")
    batch = torch.zeros(64, 64), torch.zeros(64, dtype=torch.long)
    graph = sw.capture(Classifier(), batch)
    frontier = sw.search(graph, machine, loss_chunks=(4,))
    assert avoidable(frontier.fastest(), graph, machine).host > 0


def test_a_cpu_waits_for_no_host():
    machine = sw.Machine.preset("2xcpu")
    graph, _, plan = plans(64, machine)
    assert avoidable(plan, graph, machine) == NOTHING


def test_a_fused_update_is_advised_with_the_time_that_it_takes():
    machine = sw.Machine.preset("2xH100")
    graph, frontier, plan = plans(8192, machine)
    found = avoidable(plan, graph, machine)
    helps = dict(answer_lines(plan, frontier.costs, None, avoidable=found))["would help"]
    assert "fused=True in the optimizer" in helps
    fused = sw.search(graph, machine, optimizer="adamw_fused")
    same = next(one for one in [*fused, *fused.baselines] if one.tilings == plan.tilings)
    assert sum(p.seconds for p in plan.parameters) - found.update == pytest.approx(
        sum(p.seconds for p in same.parameters)
    )
    assert avoidable(same, graph, machine).update == 0.0
