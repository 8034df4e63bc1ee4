"""Predicted weights against what torch's own optimizers then do."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.runtime.async_pipeline.prediction import (
    Direction,
    PredictionError,
    check,
    decayed,
    linear,
    predict,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.9), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "ascent": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "sgd ascent": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
}


def trained(make, gradients):
    """A parameter and its optimizer after steps with these gradients."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = make([parameter])
    advance(parameter, optimizer, gradients)
    return parameter, optimizer


def advance(parameter, optimizer, gradients):
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("updates", [1, 3, 7])
def test_under_a_steady_gradient_linear_prediction_is_exact(name, updates):
    steady = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    # Only amsgrad remembers a larger gradient; all momentum has settled.
    before = [10 * steady] if name == "amsgrad" else []
    parameter, optimizer = trained(OPTIMIZERS[name], [*before, *[steady] * 400])
    (found,) = predict(optimizer, [parameter], updates, linear)
    before = parameter.detach().clone()
    advance(parameter, optimizer, [steady] * updates)
    # Decoupled weight decay, lr·λ = 0.003, shrinks with the weights: a straight line does not.
    tolerance = 1e-10 + (0.0031 * (updates - 1) / 2 if name == "adamw" else 0)
    torch.testing.assert_close(found - before, parameter.detach() - before, rtol=tolerance, atol=0)


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_without_further_gradients_decayed_prediction_is_exact(updates):
    gradients = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameter, optimizer = trained(OPTIMIZERS["sgd"], list(gradients))
    (found,) = predict(optimizer, [parameter], updates, decayed)
    advance(parameter, optimizer, [torch.zeros(5, dtype=torch.float64)] * updates)
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("predictor", [linear, decayed])
def test_the_optimizer_is_only_read(name, predictor):
    parameter, optimizer = trained(OPTIMIZERS[name], [torch.ones(5, dtype=torch.float64)] * 3)
    state, weight = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    (found,) = predict(optimizer, [parameter], 4, predictor)
    assert not torch.equal(found, weight)
    assert torch.equal(parameter, weight)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert value is None or torch.equal(value, state["state"][0][key]), key


def test_each_group_is_predicted_with_its_own_learning_rate():
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [one]}, {"params": [other], "lr": 0.5, "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for parameter in (one, other):
        parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[other]["momentum_buffer"] = torch.ones(2)
    found = predict(optimizer, [other, one], 2, linear)
    torch.testing.assert_close(found, [torch.full((2,), -1.5), torch.full((2,), -0.3)])


def test_a_tile_is_predicted_from_the_tiles_of_its_state(tmp_path):
    whole, optimizer = trained(OPTIMIZERS["amsgrad"], [torch.ones(5, dtype=torch.float64)] * 3)
    (expected,) = predict(optimizer, [whole], 3, linear)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def tiled(value):
            return DTensor.from_local(value, mesh, [Shard(0)]) if value.ndim else value

        parameter = torch.nn.Parameter(tiled(whole.detach()))
        of_tiles = OPTIMIZERS["amsgrad"]([parameter])
        of_tiles.state[parameter] = {k: tiled(v) for k, v in optimizer.state[whole].items()}
        (found,) = predict(of_tiles, [parameter], 3, linear)
    finally:
        dist.destroy_process_group()
    assert not isinstance(found, DTensor) and torch.equal(found, expected)


@pytest.mark.parametrize("predictor", [linear, decayed])
def test_predictions_are_no_part_of_a_graph_of_gradients(predictor):
    weight = torch.nn.Parameter(torch.ones(3))
    found = predictor(weight, Direction(torch.ones(3), 0.1, 0.9), 2)
    assert not found.requires_grad and weight.requires_grad


def test_what_has_no_state_yet_is_predicted_to_stay():
    fresh, foreign = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([fresh])
    both = [fresh, foreign]
    for parameter, found in zip(both, predict(optimizer, both, 3, linear), strict=True):
        assert torch.equal(found, parameter)
        assert found.data_ptr() == parameter.data_ptr()


def test_optimizers_that_cannot_be_predicted_are_named():
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(PredictionError, match=r"RMSprop; use one of SGD, Adam, AdamW, or train"):
        check(torch.optim.RMSprop([parameter]))
    with pytest.raises(PredictionError, match=r"this SGD has momentum=0; give it momentum, or"):
        check(torch.optim.SGD([parameter], lr=0.1))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_in_training_predictions_are_nearer_than_stale_weights(name):
    """At every horizon that eight stages need, on average over a run that makes progress.

    Where updates are mostly noise, a straight line several updates long is no better.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    parameters, optimizer = list(model.parameters()), OPTIMIZERS[name](model.parameters())
    optimizer.param_groups[0]["lr"] = 0.01
    history = []
    for _ in range(80):
        x = torch.randn(32, 5)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True).tanh()).square().mean().backward()
        optimizer.step()
        made = [predict(optimizer, parameters, s, linear) for s in range(8)]
        history.append([[w.clone() for w in weights] for weights in made])
    for s in range(1, 8):
        stale = predicted = 0.0
        for before, after in zip(history, history[s:], strict=False):
            stale += sum(float((a - b).norm()) for a, b in zip(before[0], after[0], strict=True))
            predicted += sum(
                float((a - b).norm()) for a, b in zip(before[s], after[0], strict=True)
            )
        assert predicted < stale, s
