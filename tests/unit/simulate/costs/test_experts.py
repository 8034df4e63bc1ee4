"""A mixture launches the kernels that its operator runs beside its products, and moves its rows."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

from shardwright.ir.options.fp8 import MXFP8, executed_by
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.compute import backward_kernels, forward_kernels
from shardwright.simulate.costs.experts import row_kernels
from shardwright.simulate.costs.workload import Fp8Work, workload
from shardwright.tracing.capture import capture_call
from shardwright.tracing.export.operators import call_op

pytestmark = pytest.mark.hf
CONFIG = MixtralConfig(
    vocab_size=19, hidden_size=16, intermediate_size=10, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
)  # fmt: skip
NO_KERNELS = {"view", "_unsafe_view", "transpose", "unsqueeze", "split", "detach", "slice"}


class Calls(TorchDispatchMode):
    """Counts the operators that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self):
        return sum(count for name, count in self.found.items() if name not in NO_KERNELS)


@pytest.fixture(scope="module")
def mixture():
    ids = torch.zeros(4, 6, dtype=torch.long)
    model = MixtralForCausalLM(CONFIG)
    graph = capture_call(model, (), {"input_ids": ids, "labels": ids}).graph
    op = next(op for op in graph.ops if op.kind == "experts")
    return graph, op, analyze(graph).rules[op.name]


def test_the_forward_pass_has_the_kernels_of_the_operator(mixture):
    graph, op, rule = mixture
    work = workload(op, rule, graph)
    operands = {name: torch.zeros(graph.tensor[name].shape) for name in op.operands}
    operands[op.operands[1]] = operands[op.operands[1]].long()
    with Calls() as calls:
        call_op(op, operands, torch.device("cpu"))
    found = forward_kernels(work, np.array(work.sizes)[:, None])
    products = calls.found["grouped_mm_fallback"] + calls.found["_grouped_mm"]
    priced = len(found) - 1 + products  # both products are one kernel
    assert priced <= calls.kernels <= priced + 3


def test_rows_are_those_of_the_experts_of_a_device(mixture):
    graph, op, rule = mixture
    work = workload(op, rule, graph)

    def moved(**local):
        sizes = [[local.get(factor.name, factor.size)] for factor in rule.factors]
        return sum(int(kernel.moved[0]) for kernel in row_kernels(work, np.array(sizes)))

    rows, width, inner = 4 * 6 * 2, 16 * 4, 10 * 4
    assert moved() == rows * (6 * 16 + 6 * width + (2 + 3 + 2) * inner)
    # Those of some experts are summed where they are: neither zeros nor a copy.
    assert moved(e=2) == rows / 2 * (6 * 16 + 4 * width + (2 + 3 + 2) * inner)


def test_products_in_8_bits_cast_rows_and_weights_and_read_narrow_weights(mixture):
    graph, op, rule = mixture
    recipe = executed_by("mxfp8", compiled=False)

    def kernels(fp8):
        work = workload(op, rule, graph, fp8=fp8)
        sizes = np.array(work.sizes)[:, None]
        plain = len(list(row_kernels(work, sizes)))
        forward, backward = forward_kernels(work, sizes), backward_kernels(work, sizes)
        return forward[:-plain], backward[: -2 * plain]

    rows, experts, width, inner = 4 * 6 * 2, 4, 16, 10
    up, down = experts * 2 * inner * width, experts * inner * width
    cast = 4 + 2 * (1 + 1 / 32)  # of an element: read in float32, written in both layouts
    forward, backward = kernels(Fp8Work(recipe, True, 0.5))
    found = [int(one.moved[0]) for one in forward[:-1]]
    half = 0.5  # of the casts of weights: the other half is in the other micro-batch
    assert found == [
        int(elements * cast) for elements in (rows * width, rows * inner, up * half, down * half)
    ]
    found = [int(one.moved[0]) for one in backward[:-1]]
    assert found == [int(elements * cast) for elements in (rows * width, rows * 2 * inner)]
    for narrow, (wide,) in zip((forward, backward), kernels(None), strict=True):
        assert narrow[-1].dtype == MXFP8
        assert (narrow[-1].flop == wide.flop).all()
        assert wide.moved[0] - narrow[-1].moved[0] == (up + down) * (4 - 1 - 1 / 32)
