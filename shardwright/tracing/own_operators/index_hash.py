"""32 random bits for each element of a tile, a hash of its index in the whole tensor.

The hash is the 32-bit finaliser "lowbias32" (Wellons, 2018, found by search for low bias), applied
to the keys of row and column and once more to their combination.
"""

from __future__ import annotations

import torch


def key_of(state: torch.Tensor, number: torch.Tensor | int) -> torch.Tensor:
    """int32, shaped as `number`, of an operator's number, from zero, and a `random_state`.

    The state may add to the number.
    """
    number = number + 1 if state.numel() == 2 else state[2] + number + 1
    key = mix(to_int32(state[0] + 0x9E3779B9 * number))
    return mix(key ^ to_int32(state[1]))


def bits_of(rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """int32 (*rows, columns), from the int32 keys of the rows and of the columns of a tile."""
    bits = mix(rows ^ key).unsqueeze(-1) ^ columns
    bits.mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF))
    bits.mul_(_signed(0x846CA68B))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return bits


def mix(x: torch.Tensor) -> torch.Tensor:
    """The hash of int32 numbers."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def to_int32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits, as int32."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned 32-bit value."""
    return value - 2**32 if value >= 2**31 else value


def threshold_of(probability: float) -> int:
    """The smallest int32 that is kept: a share `probability` of all int32 lie below."""
    return min(2**31 - 1, -(2**31) + round(probability * 2**32))
