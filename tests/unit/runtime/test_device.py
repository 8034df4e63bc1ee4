"""Which device a rank computes on, with GPUs that are made up: torch is told what it would find."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.plan import PlanError
from shardwright.runtime import model_values
from shardwright.runtime.device import default_device, group_devices, permit_tf32, rank_device


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(count)`: as many GPUs, of which the first is current; what was made current last."""
    state = {"current": 0}

    def install(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: state["current"])
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda device: state.update(current=device.index)
        )
        return state

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return install


@pytest.fixture
def joined(monkeypatch):
    """`joined(config)`: a process group of these backends, by device."""

    def install(config):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)

    return install


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_local_rank_says_which_gpu_unless_the_caller_chose_another(
    config, gpus, joined, monkeypatch
):
    state = gpus(8)
    joined(config)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_device() == torch.device("cuda:5")
    assert state["current"] == 5
    state["current"] = 3
    assert default_device() == torch.device("cuda:3")


def test_without_a_local_rank_it_is_the_current_gpu(gpus, joined):
    gpus(8)["current"] = 0
    joined("cuda:nccl")
    assert default_device() == torch.device("cuda:0")


def test_a_group_without_gpus_is_on_the_cpu_but_for_models_on_a_gpu(gpus, joined, monkeypatch):
    gpus(0)
    joined("cpu:gloo,cuda:nccl")
    assert default_device() == torch.device("cpu")
    gpus(2)
    joined("cpu:gloo")
    assert default_device(nn.Linear(1, 1)) == torch.device("cpu")
    model = nn.Linear(1, 1)
    monkeypatch.setattr(model, "parameters", lambda: iter([_OnGpu()]))
    with pytest.raises(PlanError, match="the model is on cuda:1 and the process group joins"):
        default_device(model)


class _OnGpu:
    is_meta, device = False, torch.device("cuda:1")


def test_without_a_process_group_it_is_where_the_model_is(gpus):
    gpus(1)
    assert default_device() == torch.device("cpu")
    assert default_device(nn.Linear(1, 1)) == torch.device("cpu")
    assert default_device(nn.Linear(1, 1, device="meta")) == torch.device("cpu")
    model = nn.Linear(1, 1)
    model.parameters = lambda: iter([_OnGpu()])
    assert default_device(model) == torch.device("cuda:1")


def test_ranks_of_a_host_take_a_gpu_each(gpus):
    state = gpus(8)
    assert [rank_device(i, 8).index for i in range(8)] == list(range(8))
    assert state["current"] == 7
    gpus(0)
    assert rank_device(3, 8) == torch.device("cpu")


def test_one_visible_gpu_for_each_rank_is_used_and_too_few_are_refused(gpus, monkeypatch):
    gpus(1)
    with pytest.raises(PlanError, match="shows 1 GPUs to 8 ranks"):
        rank_device(3, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert rank_device(3, 8) == torch.device("cuda:0")
    gpus(2)
    with pytest.raises(PlanError, match="shows 2 GPUs to 8 ranks"):
        rank_device(3, 8)


def test_backends_of_unknown_devices_do_not_count(joined):
    joined("cpu:gloo,cuda:nccl,mps:gloo")
    assert group_devices() == ("cuda", "cpu")


def test_a_rank_takes_its_gpu_before_ranks_compare_values(gpus, monkeypatch):
    """All ranks compared their values on the first GPU, which NCCL refuses."""
    plan = sw.plan(nn.Linear(2, 2), (torch.ones(2, 2),), machine="1xcpu")
    state = gpus(2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    monkeypatch.setenv("LOCAL_RANK", "1")
    current = []

    def gather(found, mine):
        found[:] = [mine, mine + 1]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(
        model_values, "all_equal", lambda *_: current.append(state["current"]) is not None
    )
    with pytest.raises(PlanError, match="rank 1 would give the model other values"):
        sw.parallelize(lambda: nn.Linear(2, 2), plan)
    assert current == [1]


def test_products_in_tf32_are_switched_on_for_gpus_whose_plan_asks_for_them(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    for device, precision in (("cuda", "model"), ("cuda", "bf16"), ("cpu", "tf32")):
        permit_tf32(torch.device(device), Numerics(precision=precision))
    assert asked == []
    permit_tf32(torch.device("cuda"), Numerics(precision="tf32"))
    assert asked == ["high"]
