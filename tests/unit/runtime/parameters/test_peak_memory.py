import os

import torch
from torch import nn

from shardwright.runtime.parameters.peak_memory import metered, storage_bytes, tensors_of

CPU = torch.device("cpu")
MIB = 2**20


def test_what_lives_at_the_same_time_is_counted():
    x = torch.zeros(MIB // 4)

    def run():
        a = x + 1  # one MiB
        b = a + 1  # two
        del a
        return (b + 1).sum()  # still two

    result, most = metered(run, [x], CPU)
    assert result == 3 * MIB // 4
    assert 3 * MIB <= most < 3 * MIB + 4096


def test_a_step_is_counted_with_what_its_backward_pass_allocates():
    layer = nn.Linear(512, 512, bias=False)  # one MiB
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    x = torch.zeros(2, 512)

    def step():
        optimizer.zero_grad(set_to_none=True)
        layer(x).sum().backward()
        optimizer.step()

    step()
    state = list(tensors_of(optimizer))
    assert storage_bytes([layer.weight, layer.weight.view(-1), *state]) == 3 * MIB + 4  # a counter
    optimizer.zero_grad(set_to_none=True)
    _, most = metered(step, [layer.weight, x, *state], CPU)
    # Weight, two of state, the gradient, and what AdamW computes its update in.
    assert 4 * MIB < most <= 6 * MIB + 65536


def test_the_profiler_is_silent_and_others_are_heard(capfd):
    before = torch.zeros(MIB)

    def run():
        nonlocal before
        del before
        os.write(2, b"a word of the step\n")

    metered(run, [before], CPU)
    assert capfd.readouterr().err == "a word of the step\n"
