"""A loss that casts its logits has the price of the cast and of the loss on the copy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.machine.presets import preset
from shardwright.planner.tables.memory import workspace_bytes
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.compute import backward_seconds, forward_seconds
from shardwright.simulate.costs.workload import OperatorClass, workload

TOKENS, WIDTH, WORDS = 65536, 1024, 32768
DEVICE = preset("8xH100").device


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, dtype=torch.bfloat16)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(x).float(), labels)


def _works(logits):
    """The work of the operators that read logits."""
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        graph = sw.capture(Head(), (x, labels), logits=logits)
    rules = analyze(graph).rules
    ops = (op for op in graph.ops if op.kind in ("_to_copy", "cross_entropy_loss"))
    found = [workload(op, rules[op.name], graph) for op in ops]
    return [work for work in found if work.has_backward]


@pytest.mark.parametrize("shared", (1, 8))
def test_the_price_is_that_of_both_and_the_copies_are_no_memory(shared):
    seconds, peaks = [], []
    for works in (_works("model"), _works("fused")):
        sized = []
        for work in works:
            sizes = np.array(work.sizes, np.int64)[:, None]
            sizes[sizes == WORDS] //= shared
            sized.append((work, sizes))
        seconds.append(
            [sum(f(*one, DEVICE)[0] for one in sized) for f in (forward_seconds, backward_seconds)]
        )
        peaks.append(max(workspace_bytes(*one)[0] for one in sized))
    assert [work.kind for work in works] == [OperatorClass.CAST_LOSS]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-2)
    logits = TOKENS * WORDS // shared
    assert peaks[0] == pytest.approx(12 * logits, rel=1e-2), "both copies and both gradients"
    assert peaks[1] == pytest.approx(4 * logits, rel=1e-2)
