"""Asynchronous pipelines on real ranks: bit for bit the simulation, and no rank hangs."""

import copy
import itertools
import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import Pipeline, groups_of, stage_mesh
from shardwright.ir.plan import PlanError
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.ir.schedules.weight_versions import weights_named
from shardwright.program.decisions import Decisions, everything_whole
from shardwright.program.lower.balance import balanced_cuts, operator_work
from shardwright.rules.placements import tilings
from shardwright.runtime.async_pipeline.runner import (
    AsyncPipeline,
    async_pipeline,
)
from shardwright.runtime.async_pipeline.simulation import AsyncSimulation
from shardwright.runtime.batch import BatchError
from shardwright.runtime.comm.channel import StageFailed
from shardwright.runtime.executor.executor import ProgramRun
from shardwright.runtime.pipeline.stage import Stages, capture_stages, cut_stages
from tests.harness.models import cnn, double, gpt2
from tests.harness.ranks import run_ranks, whole
from tests.ranks.test_random_tilings import error, some_segments, stored_as

pytestmark = pytest.mark.ranks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "async.md"
STEPS = 24  # the weights of a pass are at most seven updates old
CPU = torch.device("cpu")
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
MODES = [(o, w) for o in OPTIMIZERS for w in ("stale", "stash", "spectrain")]
MODES += [("adamw", "pipeoptim"), ("momentum", "pipeoptim-decay")]
TOLERANCE = 1e-9
# Two stages of two devices each: model, mesh, optimizer, weights.
SHARED = [
    ("gpt2", "pp=2 dp=2", "momentum", "spectrain"),
    ("gpt2", "pp=2 tp=2", "adamw", "spectrain"),
    ("gpt2", "pp=2 tp=2", "momentum", "stash"),
    ("cnn", "pp=2 dp=2", "momentum", "stale"),
    ("gpt2", "dp=2 pp=2", "momentum", "spectrain"),
]


@pytest.fixture(scope="module")
def captured():
    """Models, batches and graphs: captured once, for all ranks."""
    found = {}
    for name, make in (("gpt2", gpt2), ("cnn", lambda: cnn(norm=True))):
        model, batch = double(*make())
        batches = [batch, {k: v.flip(0) for k, v in batch.items()}]
        found[name] = model, batches, capture_stages(model, (), batch, stages=1)
    return found


def cut(captured, world):
    """The subjects of the tests below: each model, its batches, its stages."""
    return {
        name: (model, batches, cut_stages(stages.captured, world))
        for name, (model, batches, stages) in captured.items()
    }


def on_ranks(subject, optimizer, how, steps, **options):
    """Losses of this rank, its loss of an evaluation, its weights after all is drained."""
    model, batches, stages = subject
    pipeline = AsyncPipeline(stages, model, weights_named(how), device=CPU)
    steps_of = OPTIMIZERS[optimizer](pipeline.parameters())
    losses = [pipeline.train_step(steps_of, batches[m % 2], **options) for m in range(steps)]
    losses = [loss for loss in losses if not loss.isnan()] + pipeline.drain(steps_of, **options)
    return losses, evaluated(pipeline, batches[0]), pipeline.state_dict()


def evaluated(pipeline, batch):
    """The loss in evaluation; None where batch norm makes it another graph, which is refused."""
    try:
        return pipeline.evaluate(batch)
    except PlanError as e:
        assert "is more than to leave dropout out" in str(e)
        return None


def simulated(subject, optimizer, how, steps, **options):
    model, batches, stages = subject
    simulation = AsyncSimulation(stages, model, how, OPTIMIZERS[optimizer], **options)
    losses = [simulation.train_step(batches[m % 2]) for m in range(steps)]
    simulation.drain()
    return losses, evaluated(simulation, batches[0]), simulation.state_dict()


def shared_out(compute, cases):
    """`compute(*case)` of every case, each on one rank, sent to all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {i: compute(*case) for i, case in enumerate(cases) if i % world == rank}
    every = [None] * world
    dist.all_gather_object(every, mine)
    return [every[i % world][i] for i in range(len(cases))]


def all_modes(subjects, modes=MODES):
    """Losses, evaluation and weights of every mode are bit for bit those of its simulation."""
    cases = [("gpt2", optimizer, how, STEPS, {}) for optimizer, how in modes]
    cases += [("cnn", "momentum", "spectrain", 20, {"clip_norm": 0.1, "discount_steps": 15})]
    pipelines = [on_ranks(subjects[name], *case, **options) for name, *case, options in cases]
    simulations = shared_out(
        lambda name, *case: simulated(subjects[name], *case[:-1], **case[-1]), cases
    )
    for case, ours, theirs in zip(cases, pipelines, simulations, strict=True):
        losses, found, weights = ours
        assert len(losses) == case[3]
        assert losses == theirs[0], case
        assert found == theirs[1]
        batch_norm = any(isinstance(m, nn.BatchNorm2d) for m in subjects[case[0]][0].modules())
        assert (found is None) == batch_norm
        for key, value in weights.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[2][key]), (case, key)


def drains_and_resumes(subject):
    """Ten steps, a checkpoint, ten more in another pipeline: the run that was only drained."""
    model, batches, stages = subject
    make, how = OPTIMIZERS["adamw"], weights_named("spectrain")
    first = AsyncPipeline(stages, model, how, device=CPU)
    optimizer = make(first.parameters())
    for m in range(10):
        first.train_step(optimizer, batches[m % 2])
    first.drain(optimizer)
    saved = {k: v.clone() if torch.is_tensor(v) else v for k, v in first.state_dict().items()}
    resumed = AsyncPipeline(stages, model, how, device=CPU)
    resumed.load_state_dict(saved)
    other = make(resumed.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it would share the tensors
    found = []
    for pipeline, steps in ((first, optimizer), (resumed, other)):
        losses = [pipeline.train_step(steps, batches[m % 2]) for m in range(10)]
        found.append([x for x in losses if not x.isnan()] + pipeline.drain(steps))
    assert found[0] == found[1]
    assert len(found[0]) == 10
    with pytest.raises(PipelineError, match=r"call drain\(optimizer\) before evaluate"):
        first.train_step(optimizer, batches[0])
        first.evaluate(batches[0])
    first.drain(optimizer)


def drawn(graph, analysis, mesh, stages, draw):
    """Stages in which every operator is split, and every parameter stored, in any way there is."""
    cuts = balanced_cuts(graph, stages, operator_work(graph, analysis))
    pipeline = Pipeline(tuple(graph.ops[i].name for i in cuts), "async stale", stages)
    return Decisions(
        mesh,
        {
            op.name: draw.choice([tiling for tiling, _ in tilings(analysis.rules[op.name], mesh)])
            for op in graph.ops
        },
        {
            leaf.name: draw.choice(stored_as(analysis.atoms[leaf.name], mesh))
            for leaf in graph.leaves_of(LeafKind.PARAMETER)
        },
        segments=some_segments(graph, draw),
        pipeline=pipeline,
    )


def shared_stages(subjects):
    """Stages on several devices each give what the simulation gives, but for the order of sums."""
    pipelines, decisions = [], []
    for name, mesh_text, optimizer, how in SHARED:
        model, batches, whole_stages = subjects[name]
        captured, analysis = whole_stages.captured, whole_stages.analysis
        mesh = Mesh.parse(mesh_text)
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        draw = random.Random(f"{mesh_text} {how}")
        decisions.append(drawn(captured.graph, analysis, stage_mesh(mesh), groups_of(mesh), draw))
        stages = Stages.planned(captured, analysis, decisions[-1])
        pipeline = AsyncPipeline(
            stages, model, weights_named(how), device=CPU, device_mesh=device_mesh
        )
        of = OPTIMIZERS[optimizer](pipeline.parameters())
        losses = [pipeline.train_step(of, batches[m % 2], clip_norm=0.5) for m in range(12)]
        losses = [loss for loss in losses if not loss.isnan()] + pipeline.drain(of, clip_norm=0.5)
        found = evaluated(pipeline, batches[0])
        weights = {key: whole(p) for key, p in pipeline.named_parameters()}
        pipelines.append((losses if found is None else [*losses, found], weights))

    def undivided(case, chosen):
        """The same stages, each on one device, simulated."""
        name, _, optimizer, how = case
        model, batches, whole_stages = subjects[name]
        alone = replace(
            everything_whole(whole_stages.captured.graph),
            segments=chosen.segments,
            pipeline=chosen.pipeline,
        )
        stages = Stages.planned(whole_stages.captured, whole_stages.analysis, alone)
        losses, found, weights = simulated(
            (model, batches, stages), optimizer, how, 12, clip_norm=0.5
        )
        return (losses if found is None else [*losses, found]), weights

    simulations = shared_out(undivided, list(zip(SHARED, decisions, strict=True)))
    for case, ours, theirs in zip(SHARED, pipelines, simulations, strict=True):
        # GPT-2 computes its loss in float32, whatever its weights are.
        assert max(error(a, b) for a, b in zip(ours[0], theirs[0], strict=True)) < 1e-5, case
        for key, weight in ours[1].items():
            there = theirs[1][key]
            assert error(there, weight.view_as(there)) < TOLERANCE, (case, key)


def fail_at(call):
    """A hook that raises when it is called for the `call`th time."""
    count = itertools.count(1)

    def hook(*_):
        if next(count) == call:
            raise ZeroDivisionError("the loss is odd <&>")

    return hook


def _after(hook, method):
    """The method, called behind a hook."""

    def called(*args):
        hook()
        return method(*args)

    return called


def one_fails(subject):
    """Every rank ends with the error of the one that failed, soon, and can be used again."""
    model, batches, stages = subject
    culprits = [(rank, "update") for rank in range(dist.get_world_size())]
    for culprit, where in [*culprits, (0, "version")]:  # which the last stage has none of
        mine, version, fails = dist.get_rank() == culprit, ProgramRun.version, fail_at(5)
        with pytest.MonkeyPatch.context() as patch:
            if mine and where == "version":
                patch.setattr(ProgramRun, "version", _after(fails, version))
            pipeline = AsyncPipeline(stages, model, weights_named("spectrain"), device=CPU)
        optimizer = OPTIMIZERS["adamw"](pipeline.parameters())
        if mine and where == "update":
            optimizer.register_step_pre_hook(fails)
        dist.barrier()
        start = time.monotonic()
        with pytest.raises((StageFailed, ZeroDivisionError)) as caught:
            for m in range(20):
                pipeline.train_step(optimizer, batches[m % 2])
            pipeline.drain(optimizer)
        assert time.monotonic() - start < 60
        if dist.get_rank() != culprit:
            text = f"stage {culprit} failed: ZeroDivisionError: the loss is odd <&>"
            assert str(caught.value) == text
        with pytest.raises(StageFailed):
            pipeline.train_step(optimizer, batches[0])
        dist.barrier()


def ranks_that_disagree(subject):
    model, _, stages = subject
    how = weights_named("stash" if dist.get_rank() == 1 else "stale")
    with pytest.raises(PipelineError, match=r"rank 1 has other stages or weights \(.*stash\)"):
        AsyncPipeline(stages, model, how, device=CPU)


def a_batch_that_lacks_something(subject):
    """Only the last stage reads labels; all ranks learn that there are none."""
    model, batches, stages = subject
    pipeline = AsyncPipeline(stages, model, weights_named("stale"), device=CPU)
    optimizer = OPTIMIZERS["adamw"](pipeline.parameters())
    given = {key: value for key, value in batches[0].items() if key != "labels"}
    with pytest.raises((StageFailed, BatchError), match=r"the argument labels is None, and"):
        for _ in range(3):
            pipeline.train_step(optimizer, given)


def documented(subject):
    """The example of docs/how-to/async.md runs, and learns."""
    model, batches, _ = subject
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = {"torch": torch, "model": model, "batch": batches[0]}
    untrained = async_pipeline(model, (), batches[0], weights="spectrain").evaluate(batches[0])
    exec(code, names)
    assert names["loss"] < untrained
    assert names["schedule"].last_epoch == 20
    assert set(names["state"]) > set(dict(names["pipeline"].named_parameters()))


def two_ranks(subjects):
    all_modes(subjects)
    drains_and_resumes(subjects["gpt2"])
    one_fails(subjects["gpt2"])
    ranks_that_disagree(subjects["gpt2"])
    a_batch_that_lacks_something(subjects["gpt2"])
    documented(subjects["gpt2"])


def four_ranks(subjects):
    all_modes(subjects, MODES[1::2])  # two stages have tried all
    one_fails(subjects["gpt2"])
    shared_stages(subjects)


def test_two_stages(captured):
    run_ranks(2, two_ranks, cut(captured, 2))


def test_four_stages(captured):
    run_ranks(4, four_ranks, cut(captured, 4))


# How it ends: world, mesh, stages, who is to blame and why, what all others say.
ENDS = {
    "killed": (3, "pp=3", 1, "killed", r"stage 1 \(rank 1\) is gone"),
    "killed beside another": (4, "pp=2 dp=2", 3, "killed", r"stage 1 \(rank 3\) is gone"),
    "failed beside another": (
        4,
        "pp=2 dp=2",
        2,
        "failed",
        r"stage 1 \(rank 2\) failed: ZeroDivisionError: the loss is odd <&>$",
    ),
}


def ends(rank, folder, subject, world, mesh_text, culprit, why):
    """Rank `culprit` ends in mid-run; the others write down how they learned of it, and when."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    model, batches, stages = subject
    mesh, device_mesh = Mesh.parse(mesh_text), None
    if len(mesh.axes) > 1:  # data-parallel stages
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        graph, inner = stages.captured.graph, stage_mesh(mesh)
        split = {op.name: tilings(stages.analysis.rules[op.name], inner) for op in graph.ops}
        decisions = replace(
            everything_whole(graph),
            mesh=inner,
            tilings={name: max(found, key=str)[0] for name, found in split.items()},
            pipeline=stages.staged.pipeline,
        )
        decisions = replace(
            decisions, storage={k: Layout.replicated(inner) for k in decisions.storage}
        )
        stages = Stages.planned(stages.captured, stages.analysis, decisions)
    pipeline = AsyncPipeline(
        stages, model, weights_named("spectrain"), device=CPU, device_mesh=device_mesh
    )
    optimizer = OPTIMIZERS["momentum"](pipeline.parameters())
    if rank == culprit and why == "failed":
        optimizer.register_step_pre_hook(fail_at(5))
    try:
        for m in range(1000):
            if rank == culprit and m == 7:
                (folder / f"rank{rank}").write_text(f"{time.time()} dies")
                os.kill(os.getpid(), signal.SIGKILL)
            pipeline.train_step(optimizer, batches[0])
    except (StageFailed, ZeroDivisionError) as e:
        (folder / f"rank{rank}").write_text(f"{time.time()} {e}")


@pytest.mark.parametrize("how", ENDS)
def test_who_ends_a_run_is_named_by_all_others(captured, tmp_path, how):
    world, mesh, culprit, why, text = ENDS[how]
    context = mp.get_context("forkserver")
    subject = cut(captured, Mesh.parse(mesh).shape[0])["cnn"]
    processes = [
        context.Process(target=ends, args=(k, tmp_path, subject, world, mesh, culprit, why))
        for k in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
    finally:
        for process in processes:
            process.kill()
    codes = [process.exitcode for process in processes]
    assert codes.pop(culprit) == (-signal.SIGKILL if why == "killed" else 0)
    assert set(codes) == {0}
    told = [(tmp_path / f"rank{rank}").read_text().split(" ", 1) for rank in range(world)]
    ended, _ = told.pop(culprit)
    for when, said in told:
        assert re.match(text, said), said
        assert float(when) - float(ended) < 30
