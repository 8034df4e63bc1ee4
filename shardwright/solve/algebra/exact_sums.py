"""Exact, correctly rounded sums of many floating-point numbers, vectorised.

Every number is an integer multiple of one power of two. Its digits are spread over a few machine
words, words are summed as integers, and only the total is rounded. The result equals `math.fsum`.
Oracle: `math.fsum`.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np

from shardwright.solve.elimination.problem import Floats, Ints

_DIGITS = 31  # bits of a number in one word: sums of 2 ** 32 numbers fit into 64 bits
_MANTISSA = 53
_MOST_WORDS = 8  # beyond this spread of exponents numbers are summed one by one
_AT_ONCE = 1 << 20  # entries of a block


@final
class ExactSums:
    """Sums over entries of `values`, which are at least zero, or infinite."""

    def __init__(self, values: Floats) -> None:
        self.values = values
        self._infinite = np.isinf(values)
        part, power = np.frexp(np.where(self._infinite, 0.0, values))
        whole = np.ldexp(part, _MANTISSA).astype(np.int64)
        used = power[whole > 0]
        self._lowest = int(used.min(initial=0)) - _MANTISSA
        shift = np.where(whole > 0, power - _MANTISSA - self._lowest, 0)
        words = -(-(int(shift.max(initial=0)) + _MANTISSA) // _DIGITS)
        self._words: list[Ints] | None = None
        if words <= _MOST_WORDS:
            self._words = [_word(whole, shift, word) for word in range(words)]

    def of(self, entries: Ints) -> Floats:
        """The sum of each row of entries: (A, terms) -> (A,)."""
        size = max(1, _AT_ONCE // max(1, entries.shape[1]))
        blocks = [entries[i : i + size] for i in range(0, len(entries), size)]
        return np.array([total for block in blocks for total in self._block(block)], np.float64)

    def _block(self, entries: Ints) -> list[float]:
        if self._words is None:
            return [math.fsum(row) for row in self.values[entries].tolist()]
        parts = [word[entries].sum(axis=1).tolist() for word in self._words]
        found = [self._rounded(words) for words in zip(*parts, strict=True)]
        if self._infinite.any():
            forbidden = self._infinite[entries].any(axis=1)
            for row in np.flatnonzero(forbidden).tolist():
                found[row] = math.inf
        return found

    def _rounded(self, words: tuple[int, ...]) -> float:
        total = sum(word << (_DIGITS * i) for i, word in enumerate(words))
        if self._lowest >= 0:
            return float(total << self._lowest)
        return total / (1 << -self._lowest)  # Python rounds this once


def _word(whole: Ints, shift: Ints, number: int) -> Ints:
    """The digits of `whole * 2 ** shift` in word `number`."""
    down = _DIGITS * number - shift  # how far the word's lowest digit is above the number's
    mask = (1 << _DIGITS) - 1
    upper = (whole >> down.clip(0, _MANTISSA)) & mask
    up = (-down).clip(0, _DIGITS)
    lower = (whole & ((1 << (_DIGITS - up)) - 1)) << up
    found: Ints = np.where(down >= 0, upper, lower)
    return found
