"""Parameters that `forward` changes in place are those of the module after a step and after two."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.tracing.call import CaptureError
from tests.harness.ranks import run_ranks, whole

MACHINE = sw.Machine.preset("2xcpu")


class Model(nn.Module):
    """A student and its frozen teacher, a coefficient, and prototypes, changed by `change`."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.scale = nn.Parameter(3 * torch.randn(4))
        self.prototypes = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.change = change
        self.double()

    def forward(self, x):
        self.change(self, x)
        self.calls += 1
        with torch.no_grad():
            target = self.teacher(x)
        found = self.student(x) * self.scale
        scores = found @ self.prototypes.T
        return F.mse_loss(found, target) + scores.logsumexp(-1).mean()


def clamped(m, x):
    with torch.no_grad():
        m.scale.clamp_(-1, 1)


def by_data(m, x):
    part = m.scale.data
    part.clamp_(-1, 1)
    part += 0.5 * part.sign()


def averaged(m, x):
    with torch.no_grad():
        for one, other in zip(m.teacher.parameters(), m.student.parameters(), strict=True):
            one.mul_(0.9).add_(other, alpha=0.1)


def normalised(m, x):
    before = m.prototypes * 2
    with torch.no_grad():
        m.prototypes.copy_(F.normalize(m.prototypes.detach().clone(), dim=1))
        m.prototypes[3:5] = m.student(x).mean() + before[0].sum()


def assigned(m, x):
    m.student.weight.data = m.student.weight.data * 0.5


def everything(m, x):
    for change in (clamped, averaged, normalised, assigned):
        change(m, x)


# A value of the whole batch, which one of the changes writes, is not that of a micro-batch.
PLANS = (
    (clamped, "R", 1), (by_data, "S(0)", 1), (everything, "S(0)", 1), (everything, "R", 1),
    (averaged, "S(0)", 2),
)  # fmt: skip


def _steps(module, batches, train):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(train(module, batch))
        optimizer.step()
    return losses, {name: whole(p) for name, p in module.named_parameters()}


def _call(module, batch):
    loss = module(batch)
    loss.backward()
    return loss.detach()


def _on_ranks(plans):
    found = []
    batches = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    for change, plan in plans:
        module = sw.parallelize(Model(change), plan)
        found.append(_steps(module, batches, lambda m, x: m.forward_backward((x,)).detach()))
    return found


@pytest.mark.ranks
def test_two_steps_are_those_of_the_module():
    batches = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    plans, expected = [], []
    for change, layout, count in PLANS:
        pins = [f"pin {name}=dp:{layout}" for name in ("*.weight", "scale", "prototypes")]
        plan = sw.plan(
            Model(change), (batches[0],), machine=MACHINE, constraints=["mesh dp=2", *pins],
            micro_batches=(count,), stages=(1,),
        )  # fmt: skip
        plans.append((change, plan))
        expected.append(_steps(Model(change), batches, _call))
    for found in run_ranks(2, _on_ranks, plans):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def _stale(m, x):
    row = m.scale[1:]
    with torch.no_grad():
        m.scale.mul_(2)
    return row.sum()


def _part(m, x):
    with torch.no_grad():
        m.teacher.weight.mul_(2)
        m.teacher.weight[0].mul_(2)


def _several(m, x):
    with torch.no_grad():
        m.scale.mul_(2)
        torch._foreach_mul_([m.scale, m.prototypes], 2.0)


def _conditional(m, x):
    with torch.no_grad():
        m.scale.mul_(2)
    return torch.cond(x.sum() > 0, lambda x: x * m.scale.sum(), lambda x: x + 1, (x,))


@pytest.mark.parametrize("change, reason", [
    (_stale, "reads a view of its parameter scale that was made before"),
    (_part, "changes a view of its parameter teacher.weight"),
    (_several, "or several parameters at once"),
    (_conditional, "torch.cond would read the old value"),
])  # fmt: skip
def test_what_would_read_or_write_old_values_is_refused(change, reason):
    with pytest.raises(
        CaptureError, match=rf"test_parameter_updates\.py:\d+\)?: the model .*{reason}"
    ):
        sw.capture(Model(change), (torch.zeros(4, 6).double(),))


def test_the_model_itself_is_not_changed_by_a_capture():
    model = Model(everything)
    before = copy.deepcopy(model.state_dict())
    graph = sw.capture(model, (torch.randn(4, 6).double(),))
    assert {name for name, _ in graph.updates} == {
        "calls", "prototypes", "scale", "student.weight", "teacher.bias", "teacher.weight",
    }  # fmt: skip
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(CaptureError, match=r"scale in place .* would round"):
        sw.capture(Model(clamped).float(), (torch.randn(4, 6),), precision="bf16")
