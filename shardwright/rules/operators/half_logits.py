"""The cross entropy of half-precision logits, which casts them to float32 for some rows at a time.

Models cast their logits to float32 before the loss. The copy, what the loss keeps of it, and its
gradient (tokens x vocabulary each) are often the peak of memory. Where nothing else reads the copy,
the loss takes the half-precision logits (`tracing/rewrites/loss_casts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.graph import Op
from shardwright.ir.options.mixed_precision import HALF_DTYPES

CROSS_ENTROPY = "shardwright.cross_entropy_loss.default"  # args: those of `aten.cross_entropy_loss`

# Elements of the float32 copy of some rows: 16 MiB, which a GPU's cache holds, and enough for
# kernels that take longer than their launch.
_PART = 2**22


def casts_by_rows(op: Op, dtype: str) -> bool:
    """Whether `op` is the cross entropy of logits of `dtype` that it casts some rows at a time."""
    return op.target == CROSS_ENTROPY and dtype in HALF_DTYPES


def row_parts(rows: int, classes: int) -> Iterator[slice]:
    """The rows of logits (rows, classes) that are cast at a time.

    >>> list(row_parts(5, 2**21))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = _rows(classes)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def part_elements(rows: int, classes: int) -> int:
    """The elements of the most rows of logits (rows, classes) that are cast at a time."""
    return min(rows, _rows(classes)) * classes


def _rows(classes: int) -> int:
    return max(1, _PART // max(1, classes))
