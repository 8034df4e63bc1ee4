"""Models that no fixed graph can express: one line that names the user's, and nothing written."""

import sys

import pytest

MODEL = """
import torch
from shardwright.train.job import Job


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
{body}
        return y.sum()


def job():
    batch = (torch.ones(8, 4),)
    return Job(Model, batch, torch.optim.SGD, [batch], 3)
"""
FIRST = 2 + MODEL.splitlines().index("        y = self.layer(x)")  # line of the body's first
BODIES = {
    "a branch": ("if y.sum() > 0:\n    y = y * 2", "decides on the value of a tensor"),
    "a number": ("y = y * y.max().item()", "aten.item.default takes a number out of a tensor"),
    "a mask": ("y = y[y > 0]", "aten.index.Tensor gives a tensor of"),
    "nonzero": ("y = y[y.sum(1).nonzero()[:, 0]]", "aten.nonzero.default gives a tensor of"),
    "a longer buffer": (
        "self.seen = torch.cat([self.seen, y.detach().sum(0)])",
        "buffer seen, torch.float32 of (4,), one of torch.float32 and (8,)",
    ),
    "a new buffer": ("self.register_buffer('late', y.detach())", "buffer late while it runs"),
}


@pytest.mark.parametrize("body, message", BODIES.values(), ids=BODIES)
def test_the_line_that_cannot_be_planned_is_named(body, message, tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file, plan = tmp_path / "unplannable.py", tmp_path / "plan.json"
    indented = "\n".join(" " * 8 + line for line in body.splitlines())
    file.write_text(MODEL.format(body=indented))
    line = mistake("plan", f"{file}:job", "--machine", "2xcpu", "-o", plan)
    assert message in line
    assert f"unplannable.py:{FIRST}" in line
    assert not plan.exists()
