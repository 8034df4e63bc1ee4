"""The module of an MLP in chunks; on its tile a device calls the operator as on the whole.

Compilers do not look into it: they would see that forward and backward pass compute the same
products, and keep them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.tracing.decompose.chunked_mlp import chunked_mlp


class ChunkedMlp(nn.Module):
    """An MLP in chunks; it takes the arguments of the operator."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any) -> Tensor:
        """The result for each row, or this device's terms of it."""
        return chunked_mlp(*args)
