"""Jobs under an asynchronous plan: the simulation's losses, drained where the weights are seen."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.runtime.async_pipeline.simulation import AsyncSimulation
from shardwright.runtime.comm.channel import StageFailed
from shardwright.runtime.pipeline.stage import capture_stages
from shardwright.tracing.capture import capture_call
from shardwright.train.async_loop import AsyncLoop, AsyncTrainable
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.export import full_state_dict
from shardwright.train.checkpoint.saving import PeriodicSaver
from shardwright.train.coordination.consensus import Consensus
from shardwright.train.data.batch import JobError
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.loop import EvaluationRecord, StepRecord, start, train
from shardwright.train.step import NonFiniteLossError
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, EVERY, CLIP, DISCOUNT, CPU = 14, 5, 0.5, 12, torch.device("cpu")


class Net(nn.Module):
    """Tied embeddings and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.up, self.drop, self.down = nn.Linear(12, 24), nn.Dropout(0.3), nn.Linear(24, 12)
        self.head = nn.Linear(12, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.down(self.drop(torch.relu(self.up(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def data():
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        ids = torch.randint(13, (6, 5), generator=generator)
        yield {"ids": ids, "labels": ids.roll(1, 1)}


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


JOB = Job(
    model=lambda: Net().double(),
    batch=lambda: next(data()),
    optimizer=optimizer,
    data=data,
    steps=STEPS,
    schedule=schedule,
    clip_norm=CLIP,
    discount_steps=DISCOUNT,  # ends in the second leg
    evaluation=lambda: itertools.islice(data(), 2),
    evaluate_every=7,
    seed=3,
)


def planned():
    seed_all(0)
    graph, machine = sw.capture(JOB.model(), (), JOB.batch()), sw.Machine.preset("2xcpu")
    frontier = sw.search(graph, machine, "adamw", stages=(2,), allow_async=True)
    return next(plan for plan in frontier if plan.schedule == "async spectrain")


def begin(plan):
    seed_all(JOB.seed)
    pipeline = sw.parallelize(JOB.model(), plan, seed=JOB.seed)
    module = AsyncTrainable(pipeline, plan, ())
    return start(module, JOB), AsyncLoop(module, JOB)


def one_leg(plan, folder, steps):
    """Train from the last checkpoint on; steps and losses, evaluations, the trained weights."""
    run, flow = begin(plan)
    checkpoints = Checkpoints(folder, plan)
    checkpoints.resume(run)
    records = []
    saving = PeriodicSaver(checkpoints, EVERY, lambda error: records.append(error))
    assert train(
        run, replace(JOB, steps=steps), CPU, records.append, saving, Consensus(8), steps_of=flow
    )
    checkpoints.close()
    losses = [(r.step, r.loss) for r in records if isinstance(r, StepRecord)]
    evaluations = [(r.step, r.evaluation) for r in records if isinstance(r, EvaluationRecord)]
    assert len(losses) + len(evaluations) == len(records)
    assert run.schedule.last_epoch == steps
    return losses, evaluations, full_state_dict(run.module, JOB.model())


def stops_at_what_is_no_number(plan):
    """The last stage says which step it is; all ranks end."""
    run, flow = begin(plan)
    with torch.no_grad():
        for parameter in run.module.parameters():
            parameter.mul_(math.inf)
    with pytest.raises((NonFiniteLossError, StageFailed), match=r"the loss of step 1 is nan"):
        train(run, replace(JOB, steps=STEPS), CPU, lambda record: None, steps_of=flow)
    with pytest.raises(JobError, match=r"Job\.accumulate is 2, and stages of an asynchronous"):
        AsyncLoop(run.module, replace(JOB, accumulate=2))


def two_ranks(plan, folder):
    legs = [one_leg(plan, folder, 8), one_leg(plan, folder, STEPS)]
    stops_at_what_is_no_number(plan)
    return legs


def simulated(plan):
    """The same: drained before each checkpoint and evaluation."""
    seed_all(JOB.seed)
    model, batches = JOB.model(), list(data())
    number = {op.name: i for i, op in enumerate(capture_call(model, (), batches[0]).graph.ops)}
    stages = capture_stages(
        model, (), batches[0], stages=2, cuts=[number[name] for name in plan.cuts]
    )
    simulation = AsyncSimulation(
        stages,
        model,
        "spectrain",
        optimizer,
        scheduler=schedule,
        clip_norm=CLIP,
        discount_steps=DISCOUNT,
        seed=JOB.seed,
    )
    losses, evaluations = [], []
    for step, batch in enumerate(batches[:STEPS], start=1):
        losses.append((step, simulation.train_step(batch).item()))
        if step in (5, 7, 8, 10, STEPS):
            simulation.drain()
        if step in (7, 8, STEPS):
            # Batches count by their six samples each.
            total = sum(6.0 * simulation.evaluate(b).item() for b in batches[:2])
            evaluations.append((step, total / 12))
    return losses, evaluations, simulation.state_dict()


def test_a_job_in_two_legs_has_the_losses_of_the_simulation(tmp_path):
    plan = planned()
    losses, evaluations, weights = simulated(plan)
    for first, second in run_ranks(2, two_ranks, plan, str(tmp_path)):
        assert first[0] + second[0] == losses
        assert first[1] + second[1] == evaluations
        for key, value in second[2].items():  # on rank 0
            assert torch.equal(value, weights[key]), key


def test_agreement_ahead_waits_for_nobody_and_finds_other_batches():
    run_ranks(2, agreed_ahead)


def agreed_ahead():
    consensus, rank = Consensus(4), torch.distributed.get_rank()
    same = {"x": torch.zeros(3)}
    for step in range(8):
        assert consensus.may_go_on()
        consensus.check_batches(step, [same])
    for step in range(4):
        assert consensus.may_go_on()
        consensus.check_batches(step, [{"x": torch.full((2,), float(rank))}])
    with pytest.raises(JobError, match="the batches of one of the last steps are not the same on"):
        for _ in range(8):
            consensus.may_go_on()
    consensus = Consensus(4)
    consensus.asked = rank == 1
    assert [consensus.may_go_on() for _ in range(5)] == [True, True, True, True, False]
