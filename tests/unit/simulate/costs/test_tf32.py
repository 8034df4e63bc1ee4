"""Products of float32 in TF32: faster on GPUs that have it, and the same program elsewhere."""

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.harness.models import MeanSquare

LAYERS, ROWS, WIDTH = 4, 4096, 2048


def subject():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return MeanSquare(nn.Sequential(*layers)), (torch.randn(ROWS, WIDTH),)


@pytest.fixture(scope="module")
def graphs():
    with torch.device("meta"):
        return {one: sw.capture(*subject(), precision=one) for one in ("model", "tf32")}


@pytest.mark.parametrize(
    "machine, faster", [("2xA100", True), ("2xH100", True), ("2xV100", False), ("2xcpu", False)]
)
def test_the_price_of_products_follows_the_gpu(graphs, machine, faster):
    plain, tf32 = (sw.price(one, machine, "dp_shard=2") for one in graphs.values())
    # Faster products may be worth gathers further ahead, which need memory.
    assert (tf32.peak_bytes == plain.peak_bytes) is (tf32.ahead == plain.ahead)
    assert (tf32.step_seconds < 0.6 * plain.step_seconds) is faster
    assert faster or tf32.step_seconds == plain.step_seconds


def test_it_is_a_word_of_strategies_and_kept_in_plans(graphs):
    plan = sw.price(graphs["tf32"], "2xA100", "dp_shard=2 tf32")
    assert sw.Plan.from_json(plan.to_json()).numerics.precision == "tf32"
    with pytest.raises(ValueError, match='capture it with precision="tf32"'):
        sw.price(graphs["model"], "2xA100", "dp_shard=2 tf32")


def test_convolutions_are_in_tf32_as_torch_has_them_by_default():
    with torch.device("meta"):
        layers = nn.Sequential(nn.Conv2d(256, 256, 3), nn.Flatten())
        graph = sw.capture(MeanSquare(layers), (torch.randn(64, 256, 32, 32),))
    a100, v100 = (sw.price(graph, f"1x{gpu}", "dp_shard=1") for gpu in ("A100", "V100"))
    assert v100.step_seconds > 3 * a100.step_seconds


def test_a_model_without_float32_is_refused():
    with torch.device("meta"):
        model, (x,) = subject()
        with pytest.raises(ValueError, match=r"parameters are torch\.bfloat16; give the model in"):
            sw.capture(model.bfloat16(), (x.bfloat16(),), precision="tf32")


def test_on_a_cpu_steps_are_those_of_the_model():
    torch.manual_seed(0)
    model, batch = MeanSquare(nn.Linear(8, 8)), {"x": torch.randn(4, 8)}
    plan = sw.price(sw.capture(model, (), batch, precision="tf32"), "1xcpu", "dp_shard=1 tf32")
    loss = sw.parallelize(model, plan)(**batch)
    assert torch.equal(loss, model(**batch))
    assert torch.get_float32_matmul_precision() == "highest"
