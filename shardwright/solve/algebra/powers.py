"""(min, +) powers of a table and the paths that attain them.

Entry [i, j] of the n-th power is the least sum over n steps from i to j. By repeated squaring that
takes O(log n) products.

Paper: TAPAS (arXiv 2302.00247) searches a repeated layer once; a power also lets its copies differ.
Complexity: K³ log n additions for each objective. Oracle: n − 1 plain products.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.solve.elimination.problem import Floats, Ints

_AT_ONCE = 1 << 15  # entries of a block of a product, which should fit into the cache


class Power(NamedTuple):
    """The n-th power of a table, and the products that it was computed from.

    `squares[b]` is the power 2 ** b; `prefixes[p]` the product of the first p + 1 squares that n
    takes, the largest first.
    """

    exponent: int
    squares: tuple[Floats, ...]  # (L, ..., K, K)
    prefixes: tuple[Floats, ...]  # (L, ..., K, K)

    @property
    def table(self) -> Floats:
        return self.prefixes[-1]


def power(table: Floats, exponent: int) -> Power:
    """The power of `table` (L, ..., K, K); `exponent` is at least 1.

    >>> one = np.array([[[0.0, 5.0], [1.0, 0.5]]])
    >>> power(one, 3).table[0].tolist()
    [[0.0, 5.0], [1.0, 1.5]]
    """
    squares = [table]
    while 2 ** len(squares) <= exponent:
        squares.append(product(squares[-1], squares[-1]))
    first, *others = _digits(exponent)
    prefixes = [squares[first]]
    for digit in others:
        prefixes.append(product(prefixes[-1], squares[digit]))
    return Power(exponent, tuple(squares), tuple(prefixes))


def product(left: Floats, right: Floats) -> Floats:
    """Entry [i, j] is the least of left[i, k] + right[k, j]: (L, ..., I, K), (L, ..., K, J)."""
    shape = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    rows, inner, columns = *left.shape[-2:], right.shape[-1]
    lefts = np.broadcast_to(left, (*shape, rows, inner)).reshape(-1, rows, inner, 1)
    rights = np.broadcast_to(right, (*shape, inner, columns)).reshape(-1, inner, 1, columns)
    found = np.empty((len(lefts), rows, columns), left.dtype)
    size = max(1, _AT_ONCE // (rows * columns))
    for begin in range(0, len(found), size):
        one, other = lefts[begin : begin + size], rights[begin : begin + size]
        best = found[begin : begin + size]
        np.add(one[:, :, 0], other[:, 0], out=best)
        total = np.empty_like(best)
        for k in range(1, inner):
            np.add(one[:, :, k], other[:, k], out=total)
            np.minimum(best, total, out=best)
    return found.reshape(*shape, rows, columns)


def paths(found: Power, index: tuple[Ints, ...], first: Ints, last: Ints) -> Ints:
    """The best path from `first` to `last`, after each step: (A,) -> (A, exponent + 1).

    `index` holds the indices of each path into the leading axes. Among equals the lower wins.
    """
    digits = _digits(found.exponent)
    marks = {0: first, found.exponent: last}
    end = found.exponent
    for prefix, digit in zip(reversed(found.prefixes[:-1]), reversed(digits[1:]), strict=True):
        middle = end - 2**digit
        marks[middle] = _between(prefix, found.squares[digit], index, first, marks[end])
        end = middle
    for digit in range(len(found.squares) - 1, 0, -1):
        half = found.squares[digit - 1]
        for begin in sorted(marks):
            if begin + 2**digit in marks and begin + 2 ** (digit - 1) not in marks:
                left, right = marks[begin], marks[begin + 2**digit]
                marks[begin + 2 ** (digit - 1)] = _between(half, half, index, left, right)
    return np.stack([marks[step] for step in range(found.exponent + 1)], axis=1)


def _between(left: Floats, right: Floats, index: tuple[Ints, ...], first: Ints, last: Ints) -> Ints:
    onward = np.moveaxis(right, -1, -2)[(*index, last)]  # (A, K)
    found: Ints = (left[(*index, first)] + onward).argmin(axis=-1)
    return found


def _digits(exponent: int) -> list[int]:
    """The powers of two that sum to `exponent`, as exponents, largest first."""
    return [b for b in range(exponent.bit_length() - 1, -1, -1) if exponent >> b & 1]
