"""Thirty steps of AdamW under any plan follow the curve of one device, by the public API alone."""

import pytest
import torch

import shardwright as sw
from benchmarks.curves import run as one_curve
from shardwright.plan_io.plan_text import plan_to_json
from tests.harness import models
from tests.harness.ranks import run_ranks
from tests.harness.rotation import rotating

STEPS, RATE = 30, 3e-3
PURE, MIXED = ["data parallel", "tensor parallel"], ["data x tensor parallel"]


def language_model(dropout):
    """In float64 throughout: Hugging Face's own loss would cast the logits to float32."""
    model, batch = models.gpt2(heads=4, hidden=24, dropout=dropout)
    return models.double(models.OwnLoss(model), batch)


# name: (a model and its batch, relative tolerance, the plain module is the reference)
EXAMPLES = {
    "gpt2": (lambda: language_model(0.0), 1e-10, True),
    "gpt2 with dropout": (lambda: language_model(0.1), 1e-10, False),
    "cnn with dropout": (lambda: models.double(*models.cnn(channels=(8, 10))), 1e-10, False),
    "gpt2 in float32": (lambda: models.gpt2(heads=4, hidden=24, dropout=0.0), 1e-4, True),
}
# world size: plans to run each model under, of the search or picked by hand
RUNS = {
    2: {
        "gpt2": ["fastest"],
        "gpt2 with dropout": ["fastest", "smallest", *PURE],
        "cnn with dropout": ["fastest", *PURE],
        "gpt2 in float32": ["fastest", *PURE],
    },
    4: {
        "gpt2": MIXED,
        "gpt2 with dropout": ["fastest", *MIXED],
        "cnn with dropout": [*MIXED, "k-cut"],
        "gpt2 in float32": ["fastest", *MIXED],
    },
}


# Every world, model and plan: `world, name of a model, name of a plan`.
RUN = rotating(
    [(world, name, plan) for world, of in RUNS.items() for name in of for plan in of[name]],
    4,
    kinds=lambda run: run,
)


@pytest.fixture(scope="module")
def serial():
    """The curve of one device, by model."""
    plain = {name: _train_plain(name) for name, (_, _, is_plain) in EXAMPLES.items() if is_plain}
    planned = [
        (name, plan_to_json(_frontier(name, 1)[0])) for name in EXAMPLES if name not in plain
    ]
    (curves,) = run_ranks(1, _train_all, planned)
    return plain | dict(zip((name for name, _ in planned), curves, strict=True))


@pytest.mark.ranks
@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("world", RUNS)
def test_every_plan_follows_the_curve_of_one_device(serial, world):
    names = dict.fromkeys(name for devices, name, _ in RUN if devices == world)
    runs = [(name, plan) for name in names for plan in _plans(name, world)]
    jobs = [(name, plan_to_json(plan)) for name, plan in runs]
    by_rank = run_ranks(world, _train_all, jobs)
    for curves in by_rank:
        for (name, plan), curve in zip(runs, curves, strict=True):
            tolerance = EXAMPLES[name][1]
            assert curve[-1] < 0.9 * curve[0], f"{name} does not learn under {plan}"
            torch.testing.assert_close(
                torch.tensor(curve, dtype=torch.float64),
                torch.tensor(serial[name], dtype=torch.float64),
                rtol=tolerance,
                atol=0.0,
                msg=lambda text, name=name, plan=plan: f"{name} under {plan}: {text}",
            )


# The job of benchmarks/curves: dropout, AdamW in groups, clipping, accumulation. Two steps a leg.
KINDS = ({2: "pipeline", 4: "data x tensor parallel", 1: "fastest", 3: "tensor parallel"},)
KINDS += ({2: "fully sharded"}, {2: "tensor parallel"})


@pytest.mark.ranks
@pytest.mark.hf
@pytest.mark.slow
def test_one_job_has_one_curve_resumed_across_devices_and_kinds_of_plans(tmp_path):
    """Three hundred steps, in float32 too: benchmarks/curves."""
    known = {devices: one_curve.plans("float64", devices, 8) for devices in (1, 2, 3, 4)}
    expected, _ = _leg(known[1]["fastest"], tmp_path / "one", 8)
    assert len(expected) == 8 and expected[-1] < expected[0]
    for number, kinds in enumerate(KINDS):
        found = []
        for devices, name in kinds.items():
            losses, first = _leg(known[devices][name], tmp_path / str(number), len(found) + 2)
            assert first == len(found)
            found += losses
        assert found == pytest.approx(expected[: len(found)], rel=1e-9, abs=0), kinds


def _leg(plan, folder, until):
    """The losses until a step, the same on all ranks, and the step that they begin after."""
    by_rank = run_ranks(
        plan.devices, one_curve.leg, str(folder), plan_to_json(plan), "float64", until
    )
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


def _plans(name, world):
    frontier = _frontier(name, world)
    known = {plan.name: plan for plan in frontier.baselines}
    known |= {"fastest": frontier.fastest(), "smallest": frontier.smallest()}
    wanted = [plan for run in RUN for plan in run[2:] if run[:2] == (world, name)]
    if "k-cut" in wanted:
        known["k-cut"] = _frontier(name, world, method="kcut")[0]
    picked = [known[plan] for plan in wanted]
    assert all(plan.devices == world for plan in picked)
    return picked


def _frontier(name, devices, method="joint"):
    model, batch = EXAMPLES[name][0]()
    graph = sw.capture(model, (), batch)
    return sw.search(graph, sw.Machine.preset(f"{devices}xcpu"), "adamw", method=method)


def _train_all(jobs):
    """The loss curve of each of `jobs`, pairs of a model's name and a plan; run on every rank."""
    curves = []
    for name, text in jobs:
        model, batch = EXAMPLES[name][0]()
        module = sw.parallelize(model, sw.Plan.from_json(text), seed=5)
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        batches = _batches(batch)
        curves.append([module.train_step(optimizer, b).item() for b in batches])
    return curves


def _train_plain(name):
    model, batch = EXAMPLES[name][0]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    curve = []
    for given in _batches(batch):
        optimizer.zero_grad()
        returned = model(**given)
        loss = returned if isinstance(returned, torch.Tensor) else returned.loss
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def _batches(batch):
    """A batch per step, three of them in turn, so that there is something to learn."""
    generator = torch.Generator().manual_seed(2)

    def shuffled(value):
        order = torch.randperm(value.numel(), generator=generator)
        return value.flatten()[order].view(value.shape)

    three = [batch, *({key: shuffled(value) for key, value in batch.items()} for _ in range(2))]
    return [three[step % 3] for step in range(STEPS)]
