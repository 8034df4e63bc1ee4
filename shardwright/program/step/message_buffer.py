"""The buffer of a message between pipeline stages: its values one after the other.

The ranks fill it (`runtime/executor/messages.py`), and the simulation of memory counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from shardwright.ir.graph import ITEM_BYTES
from shardwright.program.step.instructions import Payload

ALIGNMENT = 64  # bytes; vector kernels round equally on values that are aligned equally


class BufferLayout(NamedTuple):
    """The places of the values of a message in its buffer.

    Attributes:
        starts: the byte at which each value starts.
        sizes: the bytes of each value.
        bytes: those of the buffer; at least one, because backends send no empty message.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int


def buffer_layout(payload: Sequence[Payload]) -> BufferLayout:
    """The layout of a message; a value that is alone may be sent from its own memory.

    >>> values = [Payload("x", (3,), "float32"), Payload("y", (2,), "float64")]
    >>> buffer_layout(values)
    BufferLayout(starts=(0, 64), sizes=(12, 16), bytes=128)
    >>> buffer_layout(values[:1])
    BufferLayout(starts=(0,), sizes=(12,), bytes=12)
    """
    sizes = tuple(prod(one.shape) * ITEM_BYTES[one.dtype] for one in payload)
    aligned = sizes if len(sizes) == 1 else [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    *starts, end = accumulate(aligned, initial=0)
    return BufferLayout(tuple(starts), sizes, max(1, end))
