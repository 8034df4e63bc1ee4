"""The simulated pipeline against its definition, and against plain training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.schedules.weight_versions import WEIGHTS, WeightsError
from shardwright.program.lower.stages import StageError
from shardwright.runtime.async_pipeline.prediction import PredictionError
from shardwright.runtime.async_pipeline.simulation import AsyncSimulation, async_simulation
from shardwright.runtime.pipeline.stage import capture_stages
from tests.harness.models import cnn, double, gpt2
from tests.harness.oracles import train_asynchronously

LR, GAMMA, STEPS = 0.05, 0.9, 25


class Tower(nn.Module):
    """`h ← tanh(h W)` several times, and a mean squared error."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def tower(layers):
    torch.manual_seed(0)
    x, y = torch.randn(2, STEPS, 7, 6, dtype=torch.float64)
    return Tower(layers).double(), list(zip(x, y, strict=True))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=GAMMA)


@pytest.fixture(scope="module", params=[2, 3, 5])
def subject(request):
    model, batches = tower(request.param)
    return model, batches, capture_stages(model, batches[0], stages=request.param)


HOW = ["stale", "stash", "spectrain", "pipeoptim", "pipeoptim-decay"]
WAYS = [*((how, 0) for how in HOW), ("stale", 9), ("spectrain", 9)]


@pytest.mark.parametrize("how, discount_steps", WAYS)
def test_losses_and_weights_are_those_of_the_definition(subject, how, discount_steps):
    model, batches, stages = subject
    weights = [layer.weight.detach().T for layer in model.layers]
    expected, finals = train_asynchronously(weights, how, batches, LR, GAMMA, discount_steps)
    simulation = AsyncSimulation(stages, model, how, sgd, discount_steps=discount_steps)
    losses = [simulation.train_step(batch) for batch in batches]
    torch.testing.assert_close(losses, expected, rtol=1e-11, atol=0)
    simulation.drain()
    found = simulation.state_dict()
    for k, final in enumerate(finals):
        torch.testing.assert_close(found[f"layers.{k}.weight"], final.T, rtol=1e-11, atol=1e-14)


def test_the_ways_to_choose_weights_all_differ(subject):
    model, batches, stages = subject
    finals = {}
    for how in WEIGHTS:
        simulation = AsyncSimulation(stages, model, how, sgd)
        finals[how] = float([simulation.train_step(batch) for batch in batches][-1])
    # Of two stages none is past the middle, and the first needs no weights to go back.
    same = {("spectrain", "pipeoptim"), ("spectrain-decay", "pipeoptim-decay"), ("stash", "stale")}
    for one in finals:
        for other in finals:
            if one < other and not (len(stages.parts) == 2 and (other, one) in same):
                assert finals[one] != finals[other], (one, other)


@pytest.mark.parametrize("how", WEIGHTS)
def test_one_stage_is_plain_training(how):
    model, batch = double(*cnn(norm=True))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    simulation = async_simulation(model, (), batch, stages=1, weights=how, optimizer=sgd)
    plain, optimizer = copy.deepcopy(model), None
    optimizer = sgd(plain.parameters())
    for _ in range(4):
        loss = plain(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(simulation.train_step(batch), loss, rtol=1e-12, atol=0)
    simulation.drain()
    for key, value in simulation.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-9, atol=1e-12)
    assert {*dict(plain.named_parameters())} <= set(simulation.state_dict())


def test_nothing_is_stale_in_the_first_mini_batch_after_a_drain(subject):
    """Drained after every mini-batch, a pipeline of any length is plain training."""
    model, batches, stages = subject
    one = capture_stages(model, batches[0], stages=1)
    simulation = AsyncSimulation(stages, model, "stale", sgd)
    plain = AsyncSimulation(one, model, "stale", sgd)
    for batch in batches[:6]:
        expected = plain.train_step(batch)
        torch.testing.assert_close(simulation.train_step(batch), expected, rtol=1e-12, atol=0)
        simulation.drain()


def test_evaluation_changes_nothing_and_sees_no_dropout():
    model, batch = gpt2(dropout=0.3)
    simulation = async_simulation(model, (), batch, stages=2, weights="spectrain", optimizer=sgd)
    simulation.train_step(batch)
    simulation.drain()
    first, state = simulation.evaluate(batch), simulation.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    assert torch.equal(simulation.evaluate(batch), first)
    assert all(torch.equal(value, before[key]) for key, value in simulation.state_dict().items())
    assert not torch.equal(simulation.train_step(batch), first)


def test_schedules_step_with_each_update_and_clipping_is_per_stage(subject):
    model, batches, stages = subject

    def decay(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    simulation = AsyncSimulation(stages, model, "stale", sgd, scheduler=decay, clip_norm=1e-3)
    for batch in batches[:6]:
        simulation.train_step(batch)
    simulation.drain()
    for stage, update in zip(simulation.stages, simulation.updates, strict=True):
        assert update.optimizer.param_groups[0]["lr"] == LR * 0.5**6
        norm = torch.cat([p.grad.flatten() for p in stage.module.parameters()]).norm()
        assert norm.item() == pytest.approx(1e-3, rel=1e-2)  # torch adds 1e-6 to what it divides by


def test_predicted_weights_are_not_kept_for_the_backward_pass():
    """Stashing holds N - k - 1 copies more; prediction holds none, whatever autograd would save."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 1024)
            self.big = nn.Linear(1024, 1024)
            self.last = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

        def forward(self, x):
            x = self.big(self.first(x))
            for layer in self.last:
                x = layer(x)
            return x.square().mean()

    def held_after(simulation, steps):
        with torch.profiler.profile(profile_memory=True) as profile:
            for _ in range(steps):
                simulation.train_step(batch)
        return sum(event.self_cpu_memory_usage for event in profile.events())

    torch.manual_seed(0)
    model, batch = Wide(), (torch.randn(2, 8),)
    linears = capture_stages(model, batch, stages=1).parts[0].graph.ops
    cuts = [i for i, op in enumerate(linears) if op.kind == "linear"][2:]
    stages = capture_stages(model, batch, stages=4, cuts=cuts)
    held = {
        how: held_after(AsyncSimulation(stages, model, how, sgd), 6)
        for how in ("stale", "stash", "spectrain")
    }
    copies = {how: (held[how] - held["stale"]) / (4 * 1024**2) for how in held}
    assert copies["stash"] > 3  # of the first stage, and more of those behind it
    assert copies["spectrain"] < 0.1


def test_mistakes_are_told_before_anything_runs():
    model, batches = tower(2)
    options = {"stages": 2, "optimizer": sgd}
    with pytest.raises(WeightsError, match="'fresh' is not known; choose one of spectrain, pipe"):
        async_simulation(model, batches[0], weights="fresh", **options)
    with pytest.raises(StageError, match="2 stages need 1 cuts; 2 were given"):
        async_simulation(model, batches[0], weights="stash", cuts=[1, 2], **options)
    with pytest.raises(StageError, match=r"returns its loss, a scalar; this one returns 1 tensors"):
        async_simulation(model.layers[0], batches[0][:1], weights="stash", **options)
    options["optimizer"] = torch.optim.RMSprop
    simulation = async_simulation(model, batches[0], weights="spectrain", **options)
    with pytest.raises(PredictionError, match="RMSprop"):
        simulation.train_step(batches[0])
