"""Models whose code asks whether it is being compiled."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.tracing.call import CaptureError
from shardwright.tracing.export.compiler_questions import CompilerQuestions


class Asking(nn.Module):
    """Fails, or scales by two, where it is compiled."""

    def __init__(self, *, fails):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = fails

    def forward(self, x):
        if torch.compiler.is_compiling():
            if self.fails:
                raise TypeError("not while compiling")
            return self.linear(x).relu().sum()
        return self.linear(x).sigmoid().sum()


@pytest.mark.parametrize(("fails", "kind"), [(True, "sigmoid"), (False, "relu")])
def test_a_trace_that_fails_after_a_question_is_repeated_as_a_plain_call(fails, kind):
    graph = sw.capture(Asking(fails=fails), (torch.randn(2, 4),))
    assert [op.kind for op in graph.ops] == ["linear", kind, "sum"]


def test_a_model_that_fails_both_ways_is_refused_with_the_error_of_a_plain_call():
    class Failing(Asking):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                raise TypeError("not in a call either")
            return super().forward(x)

    with pytest.raises(CaptureError, match="not in a call either"):
        sw.capture(Failing(fails=True), (torch.randn(2, 4),))


def test_only_code_outside_of_torch_is_noted_and_answered():
    told = {name: getattr(torch.compiler, name) for name in ("is_compiling", "is_exporting")}
    questions = CompilerQuestions(as_called=True)
    with questions.answered():
        assert not torch.compiler.is_compiling()
        assert questions.asked
        inside = CompilerQuestions(as_called=False)
        with inside.answered():
            nn.Linear(2, 2)(torch.ones(1, 2))
            assert not inside.asked
    assert all(getattr(torch.compiler, name) is one for name, one in told.items())


def test_the_compiler_knows_its_functions_while_a_model_is_traced():
    """It notes them once in a process: behind `init_process_group` during the first capture."""
    code = """
import torch
import torch.distributed as dist
import shardwright as sw
from tests.unit.tracing.decompose.test_control_flow import Model, Torch, _branches

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
sw.capture(Model(_branches, Torch), (torch.ones(3, 4),))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
