"""A plan's memory depended on the processor of the host that planned, not of the one planned for.

Convolutions on CPUs pad channels to blocks, which are twice as wide with AVX-512. The planning
process was asked for its own, so plans for one machine differed between the hosts that planned.
"""

from dataclasses import replace
from unittest import mock

import torch
from torch import nn

import shardwright as sw


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 24, 3), nn.Conv2d(24, 8, 3)

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def peak(machine, here):
    batch = {"x": torch.ones(4, 8, 32, 32)}
    with mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: here):
        return sw.plan(Convolution(), kwargs=batch, machine=machine).peak_bytes


def test_a_plans_memory_is_that_of_its_machine():
    wide = sw.Machine.preset("1xcpu")
    narrow = replace(wide, device=replace(wide.device, channel_block=8))
    assert peak(wide, "AVX512") == peak(wide, "DEFAULT")
    assert peak(narrow, "AVX512") < peak(wide, "AVX512")
