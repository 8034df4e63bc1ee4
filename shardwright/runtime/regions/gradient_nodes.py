"""The autograd nodes of one call of a step program: its results, and a node for each bucket.

The results are the outputs of a chain of autograd nodes. Each node runs the backward part up to the
point where the gradients of its own leaves are final, so hooks of a parameter run while later
buckets are still computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Gradients = Sequence[torch.Tensor | None]


class PlayedCall(Protocol):
    """A call whose forward part was played."""

    def results(self) -> tuple[torch.Tensor, ...]:
        """Results of the forward part."""

    def constants(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results that have no gradient."""

    def begin(self, gradients: Gradients, kept: Sequence[torch.Tensor]) -> None:
        """Begin a backward part from the gradients of the results."""

    def gradients(self, group: int) -> Gradients:
        """Play on until the gradients of that group's leaves are final."""


def with_nodes(
    call: PlayedCall,
    groups: Sequence[Sequence[torch.Tensor]],
    kept: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The results of a call, with autograd nodes that request its gradients.

    `groups` are leaves in the order in which their gradients become final. `kept` is passed to
    the call in each backward pass; autograd releases it when no further backward pass can follow.
    """
    token = torch.empty(0)
    for number in range(len(groups) - 1, 0, -1):
        token = _Bucket.apply(call, number, token, *groups[number])  # type: ignore[no-untyped-call]
    found: tuple[torch.Tensor, ...] = _Results.apply(call, kept, token, *groups[0])  # type: ignore[no-untyped-call]
    return found


class _Bucket(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: PlayedCall, number: int, _token: torch.Tensor, *_leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.number = call, number
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, grads[0], *ctx.call.gradients(ctx.number))


class _Results(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: PlayedCall,
        kept: Sequence[torch.Tensor],
        _token: torch.Tensor,
        *_leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*kept)
        found = call.results()
        ctx.mark_non_differentiable(*call.constants(found))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Autograd raises its own error here if it has released the saved tensors.
        ctx.call.begin(grads, ctx.saved_tensors)
        return (None, None, torch.empty(0), *ctx.call.gradients(0))
