"""A step in micro-batches is the step of one device: loss, every gradient, every buffer, dropout.

Under any tilings and storage, on one rank and on several, also where micro-batches are uneven.
"""

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.placements import feasible, layouts_under, tiling_text, tilings
from shardwright.runtime.batch import BatchError
from tests.harness import models
from tests.harness.ranks import run_ranks
from tests.harness.rotation import rotating
from tests.ranks.test_random_tilings import TOLERANCE, Widened, error, some_segments, stored_as

_LOCAL = {"slice", "mask", "embed"}
ASSIGNMENTS = {2: 2}  # per number of ranks, else one
MESHES = {1: ["a=1"], 2: ["a=2"], 4: ["a=2 b=2"]}
COUNTS = (2, 3)
EXAMPLES = {
    "gpt2": lambda: models.gpt2(batch=7),
    "llama": lambda: models.llama(batch=7),
    "cnn": lambda: models.cnn(batch=7),
    "running mean": lambda: models.mlp(batch=7),
    "traps": models.traps,
    "made tensors": lambda: models.made_tensors(batch=7),
}


@pytest.mark.ranks
@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("world", MESHES)
def test_any_tilings_in_micro_batches_equal_one_device(world):
    every = [(name, text, c) for name in EXAMPLES for text in MESHES[world] for c in COUNTS]
    cases = rotating(every, 4, kinds=lambda case: case)  # all models, meshes and counts
    run_ranks(world, _compare_all, cases, _subjects())


@functools.cache
def _subjects():
    every = {name: Widened(*models.double(*example())) for name, example in EXAMPLES.items()}
    return {name: (one, one.run(one.one_device())) for name, one in every.items()}


def _compare_all(cases, subjects):
    meshes = {}
    for name, text, count in cases:
        mesh = Mesh.parse(text)
        if text not in meshes:
            meshes[text] = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        _compare(name, *subjects[name], mesh, meshes[text], count)


def _compare(name, one, serial, mesh, device_mesh, count):
    draw = random.Random(f"{name} {mesh} {count}")
    micro = micro_batches(one.graph, one.analysis, count)
    options = {op.name: _options(one, micro, op, mesh) for op in one.graph.ops}
    layouts = {
        leaf.name: stored_as(one.analysis.atoms[leaf.name], mesh)
        for leaf in one.graph.leaves_of(LeafKind.PARAMETER)
    }
    for number in range(ASSIGNMENTS.get(mesh.size, 1)):
        chosen = {key: draw.choice(found) for key, found in options.items()}
        storage = {key: draw.choice(found) for key, found in layouts.items()}
        again = frozenset(key for key in storage if draw.random() < 0.5)
        segments = some_segments(one.graph, draw)
        module = one.module(mesh, chosen, storage, device_mesh, again, segments, count)
        parallel = one.run(module)
        assert serial.keys() == parallel.keys()
        errors = {key: error(serial[key], parallel[key]) for key in serial}
        worst = max(errors, key=errors.get)
        tiled = {key: " ".join(tiling_text(tiling)) for key, tiling in chosen.items()}
        stored = {key: str(layout) for key, layout in storage.items()}
        assert errors[worst] <= TOLERANCE, (
            f"{name} in {count} micro-batches on {mesh}, assignment {number}: {worst} is"
            f" {errors[worst]:.1e} off under {tiled}, {stored}, {again} and {segments}"
        )


def _options(one, micro, op, mesh):
    """Tilings that leave no rank an empty tile of any micro-batch."""
    rule, wide = one.analysis.rules[op.name], micro.mesh(mesh)
    return [
        tiling
        for tiling, _ in tilings(rule, mesh)
        if feasible(rule, layouts_under(rule, (micro.choices[op.name], *tiling), wide))
    ]


def planned(choice, count=2):
    """A classical plan of a small CNN for two devices, in micro-batches."""
    graph = sw.capture(*_small())
    frontier = sw.search(graph, sw.Machine.preset("2xcpu"), micro_batches=(count,))
    return {plan.name: plan for plan in frontier.baselines}[choice]


def _small():
    model, batch = models.double(*models.cnn(channels=(4, 6), batch=7))
    return model, (), batch


@pytest.mark.ranks
def test_a_plan_in_micro_batches_is_verified():
    plan = planned("fully sharded", 3)
    assert plan.micro_batches == 3
    model, args, batch = _small()
    report = sw.verify(model, plan, args, batch)
    assert report.ok
    assert max(report.loss_error, report.max_gradient_error, report.max_parameter_error) < 1e-9


def test_a_plan_that_its_model_cannot_follow_is_refused():
    model, batch = models.cnn(norm=True)
    (plan, *_) = sw.search(sw.capture(model, (), batch), sw.Machine.preset("1xcpu"))
    with pytest.raises(PlanError, match="the plan has 2 micro-batches, but standardize in"):
        sw.verify(model, replace(plan, micro_batches=2), (), batch)


@pytest.mark.ranks
def test_a_plan_in_micro_batches_trains():
    run_ranks(
        2, _trains, *(plan_to_json(planned(name)) for name in ("data parallel", "fully sharded"))
    )


def _trains(*texts):
    for text in texts:
        plan = sw.Plan.from_json(text)
        model, _, batch = _small()
        module = sw.parallelize(model, plan, seed=5)
        module(**batch).backward()  # the first batch is compared over the ranks
        _moves_what_the_plan_says(plan, module, batch)
        _takes_local_batches(module, batch)


def _moves_what_the_plan_says(plan, module, batch):
    """A step runs its program's collectives, of as many bytes as the plan counts and pays for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        module(**batch).backward()
    names = {  # as the process group is asked, whether through DTensor or not
        "allreduce_": "all_reduce",
        "send": "all_gather",  # to the other rank
        "alltoall_base_": "all_to_all",
    }
    moved = Counter()
    for event in seen.key_averages():
        room, _, kind = event.key.partition("::")
        if room == "c10d" and kind in names:
            moved[names[kind]] += event.count
    listed, sizes = Counter(), Counter()
    for transfer in module._sw_program.program.transfers():
        kind = transfer.collective.value
        # Gloo scatters a sum by messages, too.
        listed["all_gather" if kind == "reduce_scatter" else kind] += 1
        sizes[kind] += transfer.bytes
    assert moved == listed, f"{plan.name}: {moved} instead of {listed}"
    said = Counter()
    for transfer in plan.transfers:
        for kind in {text.split()[0] for text in transfer.collectives} - _LOCAL:
            said[kind] += transfer.bytes * transfer.times
    assert sizes == said, f"{plan.name}: {sizes} bytes instead of {said}"
    assert sum(listed.values()) <= 10


def _takes_local_batches(module, batch):
    module.eval()
    local = module.local_batch(batch)
    with torch.no_grad():
        assert torch.equal(module(**local), module(**batch))
    for key, value in module.local_batch(local).items():
        assert torch.equal(local[key], value)
    rank = torch.distributed.get_rank()
    rows = [[0, 1, 4, 5], [2, 3, 6]][rank]  # micro-batches of 4 and 3, each over two ranks
    assert torch.equal(local["images"], batch["images"][rows])
    with pytest.raises(BatchError, match=rf"this rank's part of it, \[{len(rows)}, 3, 12, 12\]"):
        module(images=batch["images"][:5], classes=batch["classes"])
    module.train()
