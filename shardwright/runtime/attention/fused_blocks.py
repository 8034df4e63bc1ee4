"""Attention of a block of queries and keys by torch's fused kernels, with what joins blocks.

The kernels return, beside the result, the log-sum-exp of the scores of each row, and their backward
pass takes that of a row over all blocks, so that no block of scores is in memory (Dao et al.,
"FlashAttention", 2022). `torch.nn.functional` has no call that returns it: the operators of this
file are private ones of torch, which its own context parallelism calls, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from shardwright.program.instructions import has_fused_blocks

_ATEN = torch.ops.aten
_HOPPER = (9, 0)  # from here on cuDNN's kernels are the faster ones, and those torch prefers

Block = tuple[Tensor, Tensor, Tensor]  # query, key and value


class Kernel(ABC):
    """A fused kernel for tensors [batch, heads, length, width], of as many queries as keys."""

    @abstractmethod
    def forward(self, block: Block, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """The result, and the log-sum-exp of each row's scores, in any shape."""

    @abstractmethod
    def backward(
        self, given: Tensor, block: Block, result: Tensor, sums: Tensor, causal: bool, scale: float
    ) -> Block:
        """Gradients, with the result and log-sum-exp [batch, heads, length] over all blocks."""


class _OnCPU(Kernel):
    def forward(self, block: Block, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        call = _ATEN._scaled_dot_product_flash_attention_for_cpu
        found: tuple[Tensor, Tensor] = call(*block, 0.0, causal, scale=scale)
        return found

    def backward(
        self, given: Tensor, block: Block, result: Tensor, sums: Tensor, causal: bool, scale: float
    ) -> Block:
        call = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        found: Block = call(given, *block, result, sums, 0.0, causal, scale=scale)
        return found


class _Flash(Kernel):
    def forward(self, block: Block, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        call = _ATEN._scaled_dot_product_flash_attention
        found: tuple[Tensor, Tensor] = call(*block, 0.0, causal, scale=scale)[:2]
        return found

    def backward(
        self, given: Tensor, block: Block, result: Tensor, sums: Tensor, causal: bool, scale: float
    ) -> Block:
        call = _ATEN._scaled_dot_product_flash_attention_backward
        found: Block = call(
            given, *block, result, sums.contiguous(), *_sequences(block), 0.0, causal,
            *_no_numbers(torch.uint64, given), scale=scale,
        )  # fmt: skip
        return found


class _CuDNN(Kernel):
    def forward(self, block: Block, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        call = _ATEN._scaled_dot_product_cudnn_attention
        packed = (x.contiguous() for x in block)
        found: tuple[Tensor, Tensor] = call(*packed, None, True, 0.0, causal, scale=scale)[:2]
        return found

    def backward(
        self, given: Tensor, block: Block, result: Tensor, sums: Tensor, causal: bool, scale: float
    ) -> Block:
        call = _ATEN._scaled_dot_product_cudnn_attention_backward
        given, result, *packed = (x.contiguous() for x in (given, result, *block))
        found: Block = call(
            given, *packed, result, sums.unsqueeze(-1).contiguous(),
            *_no_numbers(torch.int64, given), None, *_sequences(block), 0.0, causal, scale=scale,
        )  # fmt: skip
        return found


def _sequences(block: Block) -> tuple[None, None, int, int]:
    """No sequences side by side, and the lengths of queries and of keys."""
    query, key, _ = block
    return None, None, query.shape[-2], key.shape[-2]


def _no_numbers(dtype: torch.dtype, like: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of random numbers, of which attention without dropout draws none."""
    unused = torch.zeros(2, dtype=dtype, device=like.device)
    return unused[0], unused[1]


def kernel_of(query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
    """The fused kernel for attention without a mask, of grouped tensors as `attend` takes them."""
    on_cpu, widths = query.device.type == "cpu", (query.shape[-1], value.shape[-1])
    if not has_fused_blocks(str(query.dtype).removeprefix("torch."), widths, on_cpu=on_cpu):
        return None
    if on_cpu:
        return _OnCPU()
    if query.device.type != "cuda":
        return None
    one, keys, values = (_flat(x) for x in (query.select(-3, 0), key, value))
    parameters = torch.backends.cuda.SDPAParams(one, keys, values, None, 0.0, False, False)
    modern = torch.cuda.get_device_capability(query.device) >= _HOPPER
    if modern and torch.backends.cuda.can_use_cudnn_attention(parameters):
        return _CuDNN()
    return _Flash() if torch.backends.cuda.can_use_flash_attention(parameters) else None


def attend(kernel: Kernel, block: Block, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Results of attention to a block, and the log-sum-exp of each row's scores.

    Args:
        kernel: what `kernel_of` says of these tensors.
        block: queries (..., heads of keys, queries of each, rows, width), keys and values
            (..., heads, columns, width).
        causal: whether row i sees the columns up to i; there are as many rows as columns then.
        scale: of the scores.

    Returns:
        The shape of the queries; and that without its last dimension, at least in single precision.
    """
    query, key, value = block
    heads = (*query.shape[:-3], query.shape[-2])
    there = _flat(key), _flat(value)
    made = [kernel.forward((_flat(one), *there), causal, scale) for one in query.unbind(-3)]
    results = [out.reshape(*heads, -1) for out, _ in made]
    return torch.stack(results, -3), torch.stack([sums.reshape(heads) for _, sums in made], -2)


def gradients(
    kernel: Kernel,
    given: Tensor,
    block: Block,
    result: Tensor,
    normalizer: Tensor,
    *,
    causal: bool,
    scale: float,
) -> Block:
    """The part of a block in the gradients of its queries, keys and values.

    Args:
        kernel: as in `attend`.
        given: the gradient of the result, of the shape of the queries.
        block: as in `attend`.
        result: attention of these queries over all blocks.
        normalizer: the log-sum-exp of the scores of each row over all blocks.
        causal: as in `attend`.
        scale: as in `attend`.
    """
    query, key, value = block
    there = _flat(key), _flat(value)
    rows: list[Any] = [x.unbind(-3) for x in (given, query, result, normalizer.unsqueeze(-1))]
    made = [
        kernel.backward(
            _flat(of_one), (_flat(one), *there), _flat(out), _flat(sums).squeeze(-1), causal, scale
        )
        for of_one, one, out, sums in zip(*rows, strict=True)
    ]
    of_query = torch.stack([found[0].reshape(rows[1][0].shape) for found in made], -3)
    of_key, of_value = (
        sum((found[i].to(normalizer.dtype) for found in made[1:]), made[0][i].to(normalizer.dtype))
        for i in (1, 2)
    )
    return of_query, of_key.reshape(key.shape), of_value.reshape(value.shape)


def _flat(x: Tensor) -> Tensor:
    """(..., heads, length, width) as (batch, heads, length, width)."""
    return x.reshape(-1, *x.shape[-3:])
