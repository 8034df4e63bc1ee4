"""Decomposes losses with reduction into their terms, a sum, and a constant factor for a mean.

An operator that returns the mean cannot be split: for tiles of different sizes the mean of their
means is another number. The rule of the operator that returns the terms is found by experiment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten: Any = torch.ops.aten

_NONE, _MEAN = 0, 1  # ATen's Reduction enum
_LOSSES = {  # the position of `reduction` among the arguments
    aten.kl_div.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.multilabel_margin_loss.default: 2,
    aten.hinge_embedding_loss.default: 3,
    aten.margin_ranking_loss.default: 4,
    aten.cosine_embedding_loss.default: 4,
    aten.poisson_nll_loss.default: 5,
    aten.triplet_margin_loss.default: 7,
}


def _terms(operator: Any, at: int) -> Callable[..., Any]:
    """A decomposition of `operator`, whose argument `at` is the reduction."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        given = dict(kwargs)
        reduction = args[at] if len(args) > at else given.pop("reduction", _MEAN)
        if reduction == _NONE:
            return NotImplemented
        terms = operator(*args[:at], *args[at + 1 :], **given, reduction=_NONE)
        if terms.numel() == 0:  # the mean of no elements is NaN
            return NotImplemented
        total = terms.sum()
        return total * (1.0 / terms.numel()) if reduction == _MEAN else total

    return decomposed


def table() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator."""
    return {operator: _terms(operator, at) for operator, at in _LOSSES.items()}
