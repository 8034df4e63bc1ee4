"""An optimizer made of two: one for parameters of two dimensions, one for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class ByShape:
    """Updates matrices by what `matrices` makes, and all other parameters by what `others` makes.

    It is an optimizer as `train_step` needs one; schedules and checkpoints take its `parts`.
    """

    def __init__(self, matrices: Make, others: Make, parameters: Iterable[torch.Tensor]) -> None:
        every = list(parameters)
        groups = (
            (matrices, [p for p in every if p.dim() == 2]),
            (others, [p for p in every if p.dim() != 2]),
        )
        self.parts = tuple(make(group) for make, group in groups if group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, as a torch optimizer has them."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero."""
        for part in self.parts:
            part.zero_grad(set_to_none)
