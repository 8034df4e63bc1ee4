"""`torch.cond`, `scan` and `map` inside a model: values and gradients of plain Python."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan

import shardwright as sw
from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose import control_flow

MACHINE = sw.Machine.preset("1xcpu")


class Model(nn.Module):
    """`made` of two layers and the input, by functions of torch or by plain Python."""

    def __init__(self, made, flow):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.made, self.flow = made, flow

    def forward(self, x):
        return self.made(self, self.flow, x).square().sum()


class Torch:
    cond, scan, map = staticmethod(torch.cond), staticmethod(scan), staticmethod(mapped)


class Plain:
    @staticmethod
    def cond(taken, yes, no, operands):
        return (yes if taken else no)(*operands)

    @staticmethod
    def scan(step, carried, xs, dim=0, reverse=False):
        rows, order = [], range(xs.shape[dim])
        for i in reversed(order) if reverse else order:
            carried, row = step(carried, xs.select(dim, i))
            rows.append(row)
        rows = rows[::-1] if reverse else rows
        return carried, torch.stack(rows, dim)

    @staticmethod
    def map(function, xs):
        return torch.stack([function(x) for x in xs])


def _branches(m, flow, x):
    return flow.cond(x.sum() > 0, lambda x: m.one(x), lambda x: m.two(x).tanh(), (x,))


def _infinite(m, flow, x):
    """The derivative of the branch that is not taken is not a number."""
    h = m.one(x)
    return flow.cond(x.sum() > 0, lambda h, x: h + x, lambda h, x: (h - h).sqrt() / (h - h), (h, x))


def _nested(m, flow, x):
    def frozen(h):
        with torch.no_grad():
            scale = h.abs().sum()
        return flow.cond(h.mean() > 9, lambda h: h.exp(), lambda h: h * scale, (h,))

    return flow.cond(x.sum() > 0, frozen, lambda h: h.sin(), (m.two(m.one(x)),))


def _backwards(m, flow, x):
    def step(carried, row):
        carried = (m.two(carried) + row).tanh()
        return carried, carried * 2

    last, rows = flow.scan(step, torch.zeros_like(x[:, 0]), m.one(x), dim=1, reverse=True)
    return rows.sum(1) + last


def _rows(m, flow, x):
    return flow.map(lambda row: m.one(row).cumsum(0), x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("made", [_branches, _infinite, _nested, _backwards, _rows])
def test_control_flow_is_that_of_python(made, sign):
    if made is _infinite and sign < 0:
        pytest.skip("the branch that is taken is not a number")
    torch.manual_seed(0)
    x = torch.rand(3, 5, 4, dtype=torch.float64) * sign
    model = Model(made, Torch).double()
    parallel = sw.parallelize(model, sw.plan(model, (x,), machine=MACHINE))
    model.flow = Plain
    loss, expected = parallel(x), model(x)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    found = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        ours = found[name].grad
        ours = torch.zeros_like(parameter) if ours is None else ours.reshape(parameter.shape)
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14, msg=name)


def _drawing(m, flow, x):
    return flow.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: m.one(x), (x,))


def test_what_cannot_be_inlined_is_refused_with_the_line(monkeypatch):
    x = torch.rand(3, 5, 4)
    with pytest.raises(CaptureError, match=r"test_control_flow\.py:\d+.*draws random numbers"):
        sw.capture(Model(_drawing, Torch), (x,))
    monkeypatch.setattr(control_flow, "_MOST_NODES", 8)
    with pytest.raises(CaptureError, match=r"test_control_flow\.py:\d+.*has 5 steps of"):
        sw.capture(Model(_backwards, Torch), (x,))
