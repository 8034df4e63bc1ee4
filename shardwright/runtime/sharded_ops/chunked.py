"""Modules of losses and MLPs that are computed in chunks.

Compilers do not look into them: a compiler would see that forward and backward pass compute the
same logits, or the same products, and keep them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.ir.graph import Ref
from shardwright.program.instructions import Dropout, DroppedMlp, Joint
from shardwright.rules.operators.mlp_chunks import STEPS
from shardwright.runtime.random.dropout import GlobalDropout, StepKeys
from shardwright.tracing.export.operators import to_torch
from shardwright.tracing.graph_builder import DROPOUT
from shardwright.tracing.own_operators.chunked_mlp import chunked_mlp
from shardwright.tracing.own_operators.linear_cross_entropy import (
    LossForm,
    Reduce,
    linear_cross_entropy,
    loss_in_chunks,
)


class ChunkedLoss(nn.Module):
    """A loss whose classes are all on this device; it takes the arguments of the operator."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any) -> Tensor:
        """The summed loss."""
        return linear_cross_entropy(*args)


class TiledChunkedLoss(nn.Module):
    """One `Joint` loss in chunks: this device's terms of the loss."""

    def __init__(self, instruction: Joint, reduce: Reduce) -> None:
        super().__init__()
        self.op, self.reduce = instruction.op, reduce
        self.tile = tuple(n for atom in instruction.tile for n in atom)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *given: Tensor) -> Tensor:
        """The operands in order, with the local rows of weight, bias and class weights."""
        values = dict(zip(self.op.operands, given, strict=True))
        x, weight, bias, target, class_weight, *others = (
            to_torch(arg, values, given[0].device) for arg in self.op.args
        )
        ignored, smoothing, chunks, dtype = others
        form = LossForm(ignored, smoothing, chunks, dtype, self.tile, self.reduce)
        return loss_in_chunks(x, weight, bias, target, class_weight, form)

    def extra_repr(self) -> str:
        return f"tile={self.tile}"


class ChunkedMlp(nn.Module):
    """An MLP in chunks, on all of its inner features or a tile of them.

    It takes the arguments of the operator, which on a tile gives this device's terms of the result.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any) -> Tensor:
        """The result, or its terms, for each row."""
        return chunked_mlp(*args)


class ChunkedDroppedMlp(nn.Module):
    """One `DroppedMlp` instruction, with the numbers that the MLP as a whole draws."""

    def __init__(
        self, instruction: DroppedMlp, device: torch.device, keys: StepKeys | None = None
    ) -> None:
        super().__init__()
        self.op = instruction.op
        steps = json.loads(str(self.op.args[STEPS]))
        (probability,) = (args[1] for target, args, _ in steps if target == DROPOUT)
        dropped = replace(self.op, args=(Ref(""), probability, instruction.number), kwargs=())
        self.dropout = GlobalDropout(Dropout(dropped, instruction.positions), device, keys)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *given: Tensor) -> Tensor:
        """The operands in order, and the random state."""
        *tensors, state = given
        values = dict(zip(self.op.operands, tensors, strict=True))
        args = [to_torch(arg, values, tensors[0].device) for arg in self.op.args]
        if self.training:
            rows, columns, key = self.dropout.tile(state)
            args += [self.dropout.number, (rows.flatten(), columns, key)]
        return chunked_mlp(*args)
