"""Sixty strategies on four ranks: schedule x micro-batches x sharding x tensor parallelism."""

from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel import build
from shardwright.tracing.capture import capture_call
from tests.harness import models
from tests.harness.ranks import run_ranks, whole
from tests.ranks.test_random_tilings import error

WORLD, TOLERANCE = 4, 1e-10
SCHEDULES = (
    *("GPipe", "1F1B", "Interleaved1F1B/v2", "LoopedBFS/v2"),
    *("InterleavedZeroBubble/v2", "ZBVZeroBubble/v2"),
)
IN_A_STAGE = ("dp_replicate=2 zero=0", "dp_shard=2 zero=2", "dp_shard=2", "tp=2")
WITHOUT_STAGES = (
    "dp_replicate=2 dp_shard=2",
    "dp_shard=2 tp=2",
    "dp_shard=2 zero=2 tp=2",
    "dp_replicate=2 tp=2 zero=0",
)
CASES = (
    *(
        f"pp=2:{schedule} {sharding} mb={count}"
        for schedule in SCHEDULES
        for sharding in IN_A_STAGE
        for count in (2, 4)
    ),
    *(f"{sharding} mb={count}" for sharding in WITHOUT_STAGES for count in (1, 2, 4)),
)


def subject():
    return models.small_llama(layers=4, hidden=16, heads=2, rows=16, length=6)


def errors_of(cases, world=WORLD):
    """The largest relative error of the loss and of any gradient, by case: what all ranks see."""
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    plans = {text: sw.price(graph, f"{world}xcpu", text, "sgd") for text in cases}
    every = run_ranks(world, _trained, plans, timeout=1800)
    return {text: max(found[text] for found in every) for text in cases}


def _trained(plans):
    model, batch = subject()
    captured = capture_call(model, (), batch)  # once for all: it takes longer than a step
    graph, analysis = captured.graph, analyze(captured.graph)
    loss = model(**batch)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    meshes, found = {}, {}
    for text, plan in plans.items():
        mesh = plan.mesh
        if mesh not in meshes:
            meshes[mesh] = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        options = ModuleOptions(
            dict(model.named_parameters(remove_duplicate=False)),
            dict(model.named_buffers(remove_duplicate=False)),
            seed=3,
        )
        decisions = read_plan(plan, graph, analysis)
        module = build(captured, analysis, decisions, options, meshes[mesh])
        errors = [error(loss.detach(), module.forward_backward(batch))]
        for name, parameter in module.named_parameters():
            errors.append(error(expected[name], whole(parameter.grad)))
        assert len(errors) > len(graph.leaves_of(LeafKind.PARAMETER)) // 4, text
        found[text] = max(errors)
    return found
