"""Decomposes stacks of recurrent layers with dropout into layers and dropout operators.

Torch's operator for the whole stack would draw its own random numbers. A call without dropout, in
eval mode or of one layer is not decomposed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

aten: Any = torch.ops.aten


class _Call(NamedTuple):
    """The arguments of torch's recurrent operators, in order; LSTMs have a list of `states`."""

    x: Tensor
    states: Any
    params: list[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def _decomposed(operator: Any) -> Any:
    """A decomposition of `operator` that calls it once for each layer."""

    def decomposed(*args: Any) -> Any:
        call = _Call(*args)
        if not (call.train and call.dropout > 0 and call.num_layers > 1):
            return NotImplemented
        return _layers(operator, call)

    return decomposed


def _layers(operator: Any, call: _Call) -> Any:
    """One call of `operator` per layer.

    As in torch, time is the first dimension of the operand of dropout.
    """
    directions = 2 if call.bidirectional else 1
    alone = isinstance(call.states, Tensor)
    states = [call.states] if alone else list(call.states)
    x = call.x.transpose(0, 1) if call.batch_first else call.x
    per_layer = len(call.params) // call.num_layers
    finals: list[list[Tensor]] = []
    for layer in range(call.num_layers):
        mine = [s.narrow(0, layer * directions, directions) for s in states]
        weights = call.params[layer * per_layer : (layer + 1) * per_layer]
        if layer > 0:
            x = aten.native_dropout.default(x, call.dropout, True)[0]
        one = call._replace(
            x=x,
            states=mine[0] if alone else mine,
            params=weights,
            num_layers=1,
            dropout=0.0,
            batch_first=False,
        )
        x, *final = operator(*one)
        finals.append(final)
    x = x.transpose(0, 1) if call.batch_first else x
    return (x, *(torch.cat(parts) for parts in zip(*finals, strict=True)))


def table() -> dict[Any, Any]:
    """Decompositions by operator."""
    operators = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    return {operator: _decomposed(operator) for operator in operators}
