"""Models of the zoo: what is captured is what the module computes."""

import pytest
import torch
from torch import nn

from tests.zoo import HUGGING_FACE
from tests.zoo.subject import Subject, capture_error

# One of each kind of trouble; `make models` runs all of them on ranks. Mixtral is not among them:
# its own kernel refuses sizes as small as these when the plain module runs.
OFTEN = ("u-net", "lstm lm", "efficientnet_b0", "clip", "segformer")
CASES = [
    pytest.param(name, marks=[pytest.mark.hf] if name in HUGGING_FACE else []) for name in OFTEN
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_what_the_module_computes(name):
    error, where = capture_error(name)
    assert error <= 1e-3, where


class _ScaledByConstant(nn.Linear):
    def forward(self, x):
        return (super().forward(x) / torch.tensor(8.0).sqrt()).sum()


def test_constants_are_as_wide_as_the_graph():
    one = Subject(_ScaledByConstant(3, 3), {"x": torch.ones(2, 3)})
    assert one.captured.constants
    for name, constant in one.captured.constants.items():
        assert str(constant.dtype) == f"torch.{one.graph.tensor[name].dtype}"
