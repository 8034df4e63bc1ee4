"""PipeMare's smaller learning rates for stale gradients at the beginning of training.

Paper: PipeMare (arXiv 1910.05124), its first technique: a stage whose gradients are τ updates late
trains with η / τ^p, where p falls from 1 to 0 over the first updates, after which weights change
slowly enough.
Deviation: 1 + τ instead of τ, because here the last stage has no delay and trains with η.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def discount(late: int, made: int, steps: int) -> float:
    """The factor of a stage's learning rate in update `made`, counted from 0.

    `late` is the number of updates between the two passes of a mini-batch. The factor is 1 after
    `steps` updates.

    >>> [round(discount(3, made, 4), 3) for made in range(6)]
    [0.25, 0.354, 0.5, 0.707, 1.0, 1.0]
    """
    if made >= steps:
        return 1.0
    return float((1 + late) ** (made / steps - 1))


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """A context in which all learning rates of `optimizer` are multiplied by `factor`."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
