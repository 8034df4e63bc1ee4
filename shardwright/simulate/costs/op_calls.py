"""Estimates the seconds of an operator's calls from measured timings.

At measured sizes the timing is used. At other sizes of the same operator, the formula is multiplied
by the ratio of timing and formula at the most similar measured sizes. Otherwise unmeasured calls
would look better or worse than measured ones only because of the formula's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import Arg, Graph, Op, Ref
from shardwright.machine.calls import OpCall, OperandSpec, Timing, by_call, by_target
from shardwright.rules.rule import Dims, Rule

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_EQUAL_WORK = 0.01  # the largest log-ratio of the formula between calls of equal work
_NOISE = 0.04  # standard deviation of a log-timing between processes, on CPUs
_DRAWING = ("dropout", "rand", "bernoulli", "uniform", "normal_")  # the runtime replaces them


@dataclass(frozen=True, slots=True)
class UnsizedCall:
    """A call without sizes.

    `tensors` has, for each tensor, the factors of every dimension by their index in the rule, the
    dtype, and whether it requires a gradient.
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    tensors: tuple[tuple[tuple[tuple[int, ...], ...], str, bool], ...]

    def at(self, sizes: Sequence[int]) -> OpCall:
        """The call at local `sizes` of the rule's factors."""
        given = tuple(
            OperandSpec(tuple(_product(sizes, factors) for factors in dims), dtype, grad)
            for dims, dtype, grad in self.tensors
        )
        return OpCall(self.target, self.args, self.kwargs, given)

    def sizes_of(self, given: Sequence[OperandSpec], default: Sequence[int]) -> list[int] | None:
        """The sizes of the factors at which the call has the tensors `given`; None if at none.

        Factors that no tensor has are of the `default` sizes.
        """
        known: dict[int, int] = {}
        if len(given) != len(self.tensors):
            return None
        dims: list[tuple[tuple[int, ...], int]] = []
        for (shape, dtype, grad), one in zip(self.tensors, given, strict=True):
            if (dtype, grad, len(shape)) != (one.dtype, one.requires_grad, len(one.shape)):
                return None
            dims += zip(shape, one.shape, strict=True)
        for factors, size in sorted(dims, key=lambda dim: len(dim[0])):
            unknown = [factor for factor in factors if factor not in known]
            rest, left = divmod(size, _product(known, set(factors) - set(unknown)))
            if left or len(unknown) > 1 or (not unknown and rest != 1):
                return None
            known.update(dict.fromkeys(unknown, rest))
        return [known.get(factor, size) for factor, size in enumerate(default)]


def form_of(op: Op, rule: Rule, graph: Graph) -> UnsizedCall | None:
    """The call of `op` without sizes; None without operands, or if it draws random numbers."""
    if not op.operands or any(word in op.kind for word in _DRAWING):
        return None
    index = {factor.name: i for i, factor in enumerate(rule.factors)}

    def numbers(dims: Dims) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(index[name] for name in names) for names in dims)

    tensors = tuple(
        (numbers(dims), graph.tensor[name].dtype, graph.tensor[name].requires_grad)
        for name, dims in zip(op.operands, rule.operands, strict=True)
    )
    positions = iter(range(len(tensors)))
    args = tuple(_numbered(arg, positions) for arg in op.args)
    kwargs = tuple((key, _numbered(value, positions)) for key, value in op.kwargs)
    return UnsizedCall(op.target, args, kwargs, tensors)


def timed(
    formula: Callable[[Ints], Floats],
    form: UnsizedCall,
    sizes: Ints,
    timings: tuple[Timing, ...],
    same: Callable[[Ints], Bools],
    *,
    backward: bool = False,
) -> Floats:
    """Seconds of a call at K sizes, (K,), from timings of equal or similar calls.

    Timings of calls of equal work differ in the result only as far as they differ by more than
    noise (`_Others.steadied`).

    Args:
        formula: predicts seconds, (factors, K) -> (K,).
        form: the call without sizes.
        sizes: local sizes of the factors, (factors, K).
        timings: timings of any calls.
        same: at which sizes a tile is computed by this call, and not by one that depends on the
            tile's offset, (factors, K) -> (K,).
        backward: whether the seconds are those of the backward pass.
    """
    by_formula, known = formula(sizes), by_call(timings)
    found = [known.get(str(form.at(column))) for column in sizes.T.tolist()]
    there = np.array([timing is not None for timing in found]) & same(sizes)
    measured = np.array([0.0 if t is None else _seconds(t, backward) for t in found])
    others = _others(formula, form, sizes, timings, same, backward)
    for k in np.flatnonzero(there & (measured > 0) & (by_formula > 0)):
        measured[k] = by_formula[k] * np.exp(others.steadied(measured[k], by_formula[k]))
    return np.where(there, measured, by_formula * np.exp(others.nearest(sizes)))


@dataclass(frozen=True, slots=True)
class _Others:
    """M timings of a call at any sizes.

    `sizes` are those of the factors, (factors, M), `said` the formula's seconds, (M,), and `off`
    the logarithms of measured seconds over these, (M,).
    """

    sizes: Ints
    said: Floats
    off: Floats

    def steadied(self, measured: float, said: float) -> float:
        """The log-ratio of a timing and the formula, with less noise (shrinkage).

        Timings of calls for which the formula predicts the same, such as tilings of one product,
        differ mostly by noise. Each is moved towards their mean by the part of their variance that
        noise explains (James and Stein, 1961, with known noise).
        """
        off = float(np.log(measured / said))
        near = self.off[np.abs(np.log(self.said / said)) < _EQUAL_WORK]
        if len(near) < 2:
            return off
        mean, variance = float(near.mean()), float(near.var(ddof=1))
        kept = max(0.0, 1 - _NOISE**2 / variance) if variance > 0 else 0.0
        return mean + kept * (off - mean)

    def nearest(self, sizes: Ints) -> Floats | float:
        """The mean log-ratio of timings and formula at the most similar sizes, (K,).

        0 without timings. Distance is the sum of absolute log-ratios of the factors' sizes.
        """
        if not len(self.off):
            return 0.0
        gaps = np.abs(_logarithms(sizes)[:, :, None] - _logarithms(self.sizes)[:, None])
        distances = gaps.sum(axis=0)
        nearest = distances == distances.min(axis=1, keepdims=True)
        steady = [
            self.steadied(said * np.exp(off), said)
            for said, off in zip(self.said, self.off, strict=True)
        ]
        found: Floats = (nearest * np.array(steady)).sum(axis=1) / nearest.sum(axis=1)
        return found


def _others(
    formula: Callable[[Ints], Floats],
    form: UnsizedCall,
    sizes: Ints,
    timings: tuple[Timing, ...],
    same: Callable[[Ints], Bools],
    backward: bool,
) -> _Others:
    """All timings of the call `form`, at any sizes, with the formula's seconds for each."""
    near: list[list[int]] = []
    measured: list[float] = []
    default = sizes[:, 0].tolist()
    for timing, given in by_target(timings).get(form.target, ()):
        at, seconds = form.sizes_of(given, default), _seconds(timing, backward)
        if at is not None and seconds > 0:
            near.append(at)
            measured.append(seconds)
    columns = np.array(near, dtype=np.int64).reshape(len(near), len(sizes)).T
    took = np.array(measured)
    if not near:
        return _Others(columns, took, took)
    said = formula(columns)
    count = same(columns) & (said > 0)
    return _Others(columns[:, count], said[count], np.log(took[count] / said[count]))


def _logarithms(sizes: Ints) -> Floats:
    found: Floats = np.log(np.maximum(sizes, 1))
    return found


def _seconds(timing: Timing, backward: bool) -> float:
    return timing.backward if backward else timing.forward


def _numbered(arg: Arg, positions: Iterator[int]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(str(next(positions)))
    if isinstance(arg, tuple):
        return tuple(_numbered(one, positions) for one in arg)
    return arg


def _product(sizes: Sequence[int] | Mapping[int, int], factors: Iterable[int]) -> int:
    total = 1
    for factor in factors:
        total *= sizes[factor]
    return total
