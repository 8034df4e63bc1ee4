"""Models of the zoo under random tilings: loss, gradients, buffers, one step of an optimizer."""

import pytest

from tests.ranks.harness import run_ranks
from tests.zoo.huggingface import HUGGING_FACE
from tests.zoo.tilings import capture_error, random_tilings

# One of each kind of trouble; `scripts/coverage_models.py` runs the whole zoo.
OFTEN = ("u-net", "lstm lm", "efficientnet_b0", "clip", "mixtral", "segformer")
CASES = [
    pytest.param(name, marks=[pytest.mark.hf] if name in HUGGING_FACE else []) for name in OFTEN
]


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_random_tilings_equal_one_device(name):
    error, where = run_ranks(2, random_tilings, name, ["a=2"], 2)[0]
    assert error <= 1e-8, where


# Mixtral's own kernel refuses sizes as small as these when the plain module runs.
@pytest.mark.slow
@pytest.mark.parametrize("name", [case for case in CASES if case.values != ("mixtral",)])
def test_the_graph_is_what_the_module_computes(name):
    error, where = capture_error(name)
    assert error <= 1e-5, where
