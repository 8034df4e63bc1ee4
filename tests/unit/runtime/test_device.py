import pytest
import torch
import torch.distributed as dist

from shardwright.runtime.device import default_device


@pytest.mark.parametrize(
    "named, device", [("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cuda:3"), ("gloo", "cpu")]
)
def test_the_device_is_that_of_the_backend(named, device, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: named)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert default_device() == torch.device(device)


def test_without_a_process_group_it_is_the_cpu():
    assert default_device() == torch.device("cpu")
