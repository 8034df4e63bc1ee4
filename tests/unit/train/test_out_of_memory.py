from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.train.out_of_memory import explained

ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"


@pytest.fixture(scope="module")
def plan():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    graph = sw.capture(layer, (torch.zeros(4, 8),), loss="outside")
    return sw.price(graph, "1xH100", "mb=1", "adamw")


def test_the_parts_of_the_predicted_peak_and_what_helps_are_in_one_line(plan):
    text = explained(plan, torch.device("cpu"), 3, torch.OutOfMemoryError(ERROR))
    assert text.startswith(
        "rank 3 has no memory left: CUDA out of memory, Tried to allocate 2.00 GiB"
    )
    assert "GiB of tensors (parameters 0.00 + gradients 0.00 + optimizer state 0.00" in text
    assert "--memory-limit" in text and "\n" not in text
    unsettled = replace(plan, memory=None)
    text = explained(unsettled, torch.device("cpu"), 0, torch.OutOfMemoryError(ERROR))
    assert "parameters" not in text


def test_the_allocator_of_a_gpu_is_asked(plan, monkeypatch):
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 66 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * gib, 79 * gib))
    text = explained(plan, torch.device("cuda", 0), 0, torch.OutOfMemoryError(ERROR))
    assert "tensors took 66.00 GiB at most, torch's allocator holds 70.00 GiB of 79.00 GiB" in text
    assert "and 5.00 GiB are the driver's or of other programs" in text
