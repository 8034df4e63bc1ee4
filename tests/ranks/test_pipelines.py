"""Synchronous pipelines: stages on ranks give what one device gives, under every schedule.

Loss, every gradient and every updated buffer in float64. Within a stage every operator draws one
of its tilings and every parameter one of its layouts, so stages hand on tiles of any kind.
"""

import copy
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import PlanError
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.runtime.async_pipeline.runner import AsyncPipeline
from shardwright.runtime.async_pipeline.simulation import AsyncSimulation
from shardwright.runtime.pipeline.stage import capture_stages
from shardwright.tracing.capture import capture_call
from tests.harness import models
from tests.harness.pipelines import Subject
from tests.harness.ranks import run_ranks, whole
from tests.harness.rotation import rotating
from tests.ranks.test_random_tilings import error

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-9
CPU = torch.device("cpu")
# With the stages of each group.
EVERY_SCHEDULE = (
    *(("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)),
    *(("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)),
)
# On how many ranks: model, mesh, schedule, stages, micro-batches.
CASES = {
    2: [
        ("gpt2", "pp=2 dp=1", "GPipe", 2, 4),
        ("gpt2", "pp=2 dp=1", "1F1B", 2, 4),
        ("gpt2", "pp=2 dp=1", "Interleaved1F1B", 4, 4),
        ("gpt2", "pp=2 dp=1", "InterleavedZeroBubble", 4, 4),
        ("gpt2", "pp=2 dp=1", "InterleavedZeroBubble", 2, 4),
        ("gpt2", "pp=2 dp=1", "ZBVZeroBubble", 4, 4),
        ("gpt2", "pp=2 dp=1", "LoopedBFS", 4, 3),
        ("t5", "pp=2 dp=1", "1F1B", 2, 2),
        ("t5", "pp=2 dp=1", "ZBVZeroBubble", 4, 3),
        ("unet in pieces", "pp=2 dp=1", "ZBVZeroBubble", 4, 3),
        ("resnet", "pp=2 dp=1", "InterleavedZeroBubble", 2, 1),
        ("resnet in pieces", "pp=2 dp=1", "1F1B", 2, 3),
        ("resnet in pieces", "pp=2 dp=1", "Interleaved1F1B", 4, 3),
    ],
    4: [
        ("gpt2", "pp=4 dp=1", "1F1B", 4, 4),
        ("gpt2", "pp=4 dp=1", "1F1B", 4, 2),  # fewer micro-batches than stages
        ("gpt2", "pp=2 dp=2", "GPipe", 2, 2),
        ("gpt2", "pp=2 tp=2", "ZBVZeroBubble", 4, 2),
        *(
            ("layers", f"pp=2 {axis}=2", schedule, 2 * each, count)
            for schedule, each in EVERY_SCHEDULE
            for axis in ("dp", "tp")
            for count in (2, 4)
        ),
        ("t5", "pp=4 dp=1", "GPipe", 4, 3),
        ("t5", "pp=2 tp=2", "1F1B", 2, 2),
        ("unet", "pp=4 dp=1", "GPipe", 4, 1),
        ("resnet", "pp=2 dp=2", "GPipe", 2, 1),
        ("gpt2", "dp=2 pp=2", "1F1B", 2, 4),  # ranks of a stage are not neighbours
        ("layers", "dp=2 pp=2", "InterleavedZeroBubble", 4, 4),
    ],
    8: [
        ("gpt2", "dp=2 pp=2 tp=2", "1F1B", 2, 2),
        ("layers", "dp=2 pp=2 tp=2", "ZBVZeroBubble", 4, 4),
    ],
}


# Every model, mesh, number of micro-batches, and schedule with its stages.
RUN = {
    world: rotating(cases, 6, lambda case: (*case[:2], case[2:4], case[4]))
    for world, cases in CASES.items()
}


@pytest.fixture(scope="module")
def subjects():
    return {name: Subject(name) for name in {case[0] for cases in RUN.values() for case in cases}}


def compare(subjects, cases):
    meshes = {}
    for name, text, schedule, stages, count in cases:
        mesh = Mesh.parse(text)
        if text not in meshes:
            meshes[text] = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        errors = subjects[name].errors(mesh, schedule, stages, count, meshes[text])
        worst = max(errors, key=errors.get)
        case = f"{name}, {text}, {schedule}, {stages} stages, {count} micro-batches"
        assert errors[worst] <= TOLERANCE, f"{case}: {worst} is {errors[worst]:.1e} off"
        assert len(errors) > 3, case


@pytest.mark.hf
@pytest.mark.parametrize("world", RUN)
def test_pipelines_equal_one_device(subjects, world):
    known = {case[0] for case in RUN[world]}
    mine = {name: subject for name, subject in subjects.items() if name in known}
    run_ranks(world, compare, mine, RUN[world])


def planned(model, batch, stages, **options):
    """The smallest pipeline plan for two or four devices on which nothing but stages pays."""
    graph = sw.capture(model, (), batch)
    machine = sw.Machine.preset(f"{stages}xcpu")
    return graph, sw.search(graph, machine, "sgd_momentum", stages=(stages,), **options)


def trains(model, batch, plan):
    """A searched plan trains like one device, and says why it has no loss with a gradient."""
    serial = copy.deepcopy(model)
    pipeline = sw.parallelize(model, plan, seed=5)
    steps = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        alone.zero_grad()
        loss = serial(**batch)["loss"]
        loss.backward()
        alone.step()
        assert error(loss.detach(), pipeline.train_step(steps, batch)) < 1e-5  # a loss in float32
    held = dict(pipeline.named_parameters(remove_duplicate=False))
    assert 0 < len(held) < len(dict(serial.named_parameters(remove_duplicate=False)))
    for key, parameter in held.items():
        assert error(serial.get_parameter(key).detach(), whole(parameter)) < 1e-5, key
    with torch.no_grad():
        again = pipeline(**batch)
        assert error(serial(**batch)["loss"], again) < 1e-5
    with pytest.raises(PipelineError, match=r"use train_step\(optimizer, batch\)"):
        pipeline(**batch)


@pytest.mark.hf
def test_a_searched_pipeline_trains_and_is_verified():
    model, batch = models.double(*models.gpt2(layers=2, dropout=0.0, batch=4))
    _, frontier = planned(model, batch, 2)
    plan = frontier.smallest()
    assert (plan.stages, len(plan.cuts)) == (2, 1)
    assert plan_from_json(plan_to_json(plan)) == plan
    run_ranks(2, trains, model, batch, plan)
    report = sw.verify(model, plan, (), batch)
    assert report.ok, report
    assert report.devices == 2


def asynchronous(model, batch, plan):
    """A plan that says so gives the pipeline that is simulated, bit for bit."""
    how = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    pipeline = sw.parallelize(model, plan)
    assert isinstance(pipeline, AsyncPipeline)
    steps = how(pipeline.parameters())
    losses = [pipeline.train_step(steps, batch) for _ in range(4)]
    losses = [loss for loss in losses if not loss.isnan()] + pipeline.drain(steps)
    number = {op.name: i for i, op in enumerate(capture_call(model, (), batch).graph.ops)}
    cuts = [number[name] for name in plan.cuts]
    stages = capture_stages(model, (), batch, stages=2, cuts=cuts)
    simulation = AsyncSimulation(stages, model, "spectrain", how)
    assert losses == [simulation.train_step(batch) for _ in range(4)]


def test_an_asynchronous_plan_runs_and_is_not_verified():
    model, batch = models.double(*models.cnn())
    graph = sw.capture(model, (), batch)
    frontier = sw.search(
        graph, sw.Machine.preset("2xcpu"), "sgd_momentum", stages=(2,), allow_async=True
    )
    plan = next(plan for plan in frontier if plan.schedule.startswith("async"))
    run_ranks(2, asynchronous, model, batch, plan)
    with pytest.raises(PlanError, match="does not compute what one device computes"):
        sw.verify(model, plan, (), batch)
