"""Random numbers as a function of seed, step, operator and global element index.

One device, every plan and every resumed run draw the same numbers, on whichever rank an element is
computed: a number is a hash of the element's global index and does not depend on earlier draws.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import nn

from shardwright.ir.graph import Ref, argument
from shardwright.program.instructions import Attention, Dropout, Uniform
from shardwright.runtime.random.fused_dropout import fused_dropout, is_fused
from shardwright.tracing.export.attention import attention
from shardwright.tracing.export.operators import to_torch
from shardwright.tracing.own_operators.index_hash import (
    bits_of,
    key_of,
    mix,
    threshold_of,
    to_int32,
)


def random_state(seed: int, step: int, device: torch.device) -> torch.Tensor:
    """The state that masks depend on: int64 [2], seed and step.

    A third element, where there is one, is added to the number of the operator that draws.
    """
    return torch.tensor([seed, step], dtype=torch.int64, device=device)


@final
class StepKeys:
    """The keys of the random operators of a step, which are computed for all of them at once.

    A key takes thirty kernels of one element. Those of the last state are kept: a step does not
    write to its state, and the next one has another tensor.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # of operators' numbers among the keys
        self._numbers = torch.empty(0)
        self._state: weakref.ref[torch.Tensor] | None = None
        self._keys = torch.empty(0)

    def add(self, number: int) -> None:
        """Compute the key of operator `number`, too."""
        self._places.setdefault(number, len(self._places))

    def key(self, state: torch.Tensor, number: int, device: torch.device) -> torch.Tensor:
        """The key of operator `number` in a step with this state, int32 []."""
        if self._state is None or self._state() is not state:
            if len(self._numbers) < len(self._places) or self._numbers.device != device:
                self._numbers = torch.tensor([*self._places], device=device)
            self._keys = key_of(state.to(device), self._numbers)
            self._state = weakref.ref(state)
        return self._keys[self._places[number]]


class _Draws(nn.Module):
    """32 random bits per element of a tile; operators of one program share their `keys`."""

    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(
        self,
        number: int,
        positions: tuple[tuple[tuple[int, int, int], ...], ...],
        device: torch.device,
        keys: StepKeys | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self.keys = StepKeys() if keys is None else keys
        self.keys.add(number)
        self.alternative: torch.Tensor | None = None
        rows, columns = _keys(positions, device)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def choose_by(
        self,
        number: torch.Tensor,
        alternatives: Sequence[tuple[tuple[tuple[int, int, int], ...], ...]],
        device: torch.device,
    ) -> None:
        """From now on draw for the tile at `alternatives[number]`; all have one shape."""
        keys = [_keys(positions, device) for positions in alternatives]
        self.alternative = number
        self.rows = torch.stack([rows for rows, _ in keys])
        self.columns = torch.stack([columns for _, columns in keys])

    def bits(self, state: torch.Tensor) -> torch.Tensor:
        """int32, one per element, the last dimension's positions along the last dimension."""
        return bits_of(*self.tile(state))

    def tile(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int32 keys: of the rows and of the columns of this step's tile, and of the operator."""
        device = self.rows.device
        if state.numel() > 2 or torch.compiler.is_compiling():
            key = key_of(state.to(device), self.number)
        else:
            key = self.keys.key(state, self.number, device)
        if self.alternative is None:
            return self.rows, self.columns, key
        both = (self.rows, self.columns)
        rows, columns = (keys.index_select(0, self.alternative).squeeze(0) for keys in both)
        return rows, columns, key


class GlobalDropout(_Draws):
    """One `Dropout` instruction. In eval mode it does nothing."""

    def __init__(
        self, instruction: Dropout, device: torch.device, keys: StepKeys | None = None
    ) -> None:
        probability, number = instruction.op.args[1:3]
        assert isinstance(probability, float) and isinstance(number, int)
        super().__init__(number, instruction.positions, device, keys)
        self.probability = probability

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Zero each element with the given probability, scale the others by 1 / (1 - p)."""
        if not self.training:
            return x
        if self.probability >= 1.0:
            return x * 0.0
        threshold, scale = threshold_of(self.probability), 1.0 / (1.0 - self.probability)
        if is_fused(x):
            return fused_dropout(x, *self.tile(state), threshold, scale)
        return torch.where((self.bits(state) >= threshold).view(x.shape), x * scale, 0.0)

    def extra_repr(self) -> str:
        return f"p={self.probability}, number={self.number}"


class GlobalAttention(nn.Module):
    """One `Attention` instruction by its formula, with the mask that any plan draws.

    `verify` runs it in the place of the fused kernel, whose numbers differ from plan to plan.
    """

    def __init__(
        self, instruction: Attention, device: torch.device, keys: StepKeys | None = None
    ) -> None:
        super().__init__()
        self.op, self.device = instruction.op, device
        probability = argument(instruction.op, 4, "dropout_p")
        assert isinstance(probability, float)
        given = (Ref(self.op.operands[0]), probability, instruction.number)
        dropped = replace(instruction.op, args=given, kwargs=())
        self.dropout = GlobalDropout(Dropout(dropped, instruction.positions), device, keys)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Query, key, value, a mask if there is one, and the random state."""
        *tensors, state = given
        values = dict(zip(self.op.operands, tensors, strict=True))
        defaults = ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False)
        mask, _, causal = (
            to_torch(argument(self.op, i, name, default), values, self.device)
            for i, (name, default) in enumerate(defaults, start=3)
        )
        options = dict(self.op.kwargs)
        scale, grouped = options.get("scale"), options.get("enable_gqa", False)
        assert scale is None or isinstance(scale, float)
        query, key, value = (to_torch(a, values, self.device) for a in self.op.args[:3])
        return attention(
            query, key, value, mask, causal, scale, bool(grouped), lambda w: self.dropout(w, state)
        )


class GlobalUniform(_Draws):
    """One `Uniform` instruction: multiples of 2^-24 in [0, 1), whatever the precision."""

    def __init__(
        self, instruction: Uniform, device: torch.device, keys: StepKeys | None = None
    ) -> None:
        size, number = instruction.op.args
        assert isinstance(size, tuple) and isinstance(number, int)
        super().__init__(number, instruction.positions, device, keys)
        self.size = tuple(to_torch(size, {}, device))
        self.dtype: torch.dtype = to_torch(dict(instruction.op.kwargs)["dtype"], {}, device)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """The numbers of this step."""
        drawn = (self.bits(state) >> 8).bitwise_and_(0xFFFFFF)
        return (drawn.view(self.size).double() * 2.0**-24).to(self.dtype)

    def extra_repr(self) -> str:
        return f"size={self.size}, number={self.number}"


def _keys(
    positions: tuple[tuple[tuple[int, int, int], ...], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 keys of the rows and of the columns of a tile."""
    indices = [_indices(atoms, device) for atoms in positions]
    sizes = [_size(atoms) for atoms in positions]
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for index, size in zip(indices[:-1], sizes[:-1], strict=True):
        rows = rows.unsqueeze(-1) * size + index
    columns = indices[-1] if indices else torch.zeros(1, dtype=torch.int64, device=device)
    return to_int32(rows), mix(to_int32(columns))


def _indices(atoms: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """Global indices along one dimension, whose tile may have gaps between its atoms."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for start, length, size in atoms:
        part = torch.arange(start, start + length, device=device)
        index = (index.unsqueeze(-1) * size + part).flatten()
    return index


def _size(atoms: tuple[tuple[int, int, int], ...]) -> int:
    total = 1
    for _, _, size in atoms:
        total *= size
    return total
