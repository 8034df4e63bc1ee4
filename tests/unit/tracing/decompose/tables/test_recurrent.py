"""Recurrent layers: apart where there is dropout between them, together elsewhere."""

import pytest
import torch
from torch import nn

from tests.zoo.subject import Subject


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out, state = self.layer(x)
        states = state if isinstance(state, tuple) else (state,)
        return out.sin().sum() + sum(s.cos().sum() for s in states)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_taken_apart_equal_torch(kind, bidirectional):
    torch.manual_seed(0)
    layer = kind(3, 4, 3, dropout=1e-9, bidirectional=bidirectional, batch_first=True)
    model = Recurrent(layer)
    one = Subject(model, {"x": torch.randn(5, 6, 3)})
    kinds = [op.kind for op in one.graph.ops]
    assert kinds.count("dropout") == 2
    found = one.run(one.one_device())
    loss = model(one.batch["x"])
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"gradient of {key}"], parameter.grad)


def test_layers_without_dropout_stay_together():
    one = Subject(Recurrent(nn.LSTM(3, 4, 3)), {"x": torch.randn(6, 5, 3)})
    assert [op.kind for op in one.graph.ops].count("lstm") == 1
    (op,) = (op for op in one.graph.ops if op.kind == "lstm")
    rule = one.analysis.rules[op.name]
    assert rule.work_repeats == 8  # 16x3 once and 16x4 five times, in units of 16x3
    assert {str(choice) for choice in rule.choices()} >= {"b"}
