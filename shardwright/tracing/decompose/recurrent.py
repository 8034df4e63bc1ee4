"""Decomposes recurrent layers with dropout between them, so that the dropout is visible.

What torch runs as one operator would draw its own random numbers inside. Layers
without dropout stay together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def _layers(
    operator: Any,
    x: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
    pack: Any,
) -> Any:
    """One call of `operator` per layer; `pack` makes its argument of a layer's states.

    As in torch, time is the first dimension of what is dropped out.
    """
    directions = 2 if bidirectional else 1
    x = x.transpose(0, 1) if batch_first else x
    per_layer = len(params) // num_layers
    finals: list[list[Tensor]] = []
    for layer in range(num_layers):
        mine = [s.narrow(0, layer * directions, directions) for s in states]
        weights = params[layer * per_layer : (layer + 1) * per_layer]
        if layer > 0:
            x = aten.native_dropout.default(x, dropout, True)[0]
        x, *final = operator(x, pack(mine), weights, has_biases, 1, 0.0, True, bidirectional, False)
        finals.append(final)
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.cat(parts) for parts in zip(*finals, strict=True)))


def _lstm(
    x: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    if not (train and dropout > 0 and num_layers > 1):
        return NotImplemented
    operator = aten.lstm.input
    shared = (has_biases, num_layers, dropout, bidirectional, batch_first)
    return _layers(operator, x, list(hx), params, *shared, pack=list)


def _one_state(operator: Any) -> Any:
    def decomposed(
        x: Tensor,
        hx: Tensor,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not (train and dropout > 0 and num_layers > 1):
            return NotImplemented
        shared = (has_biases, num_layers, dropout, bidirectional, batch_first)
        return _layers(operator, x, [hx], params, *shared, pack=lambda states: states[0])

    return decomposed


def table() -> dict[Any, Any]:
    """Decompositions by operator."""
    single = (aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    return {aten.lstm.input: _lstm, **{operator: _one_state(operator) for operator in single}}
