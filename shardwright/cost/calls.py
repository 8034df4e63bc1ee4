"""Operators as calls at local sizes: which ones dominate plans, and what timings say of others.

A timing holds at the sizes that were measured. At other sizes of the same operator it says how
far the formula is off, and that is believed there too: else what nobody measured would look
better or worse than what was measured by nothing but the formula's error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.calls import Call, Given, Timing, by_call
from shardwright.ir.graph import Arg, Graph, Op, Ref
from shardwright.rules.rule import Dims, Rule

_DRAWING = ("dropout", "rand", "bernoulli", "uniform", "normal_")  # the runtime has its own


@dataclass(frozen=True, slots=True)
class Form:
    """A call without its sizes: of each tensor the factors of every dim, dtype, and gradient."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    tensors: tuple[tuple[tuple[tuple[int, ...], ...], str, bool], ...]

    def at(self, sizes: Sequence[int]) -> Call:
        """The call with factors of these local sizes."""
        given = tuple(
            Given(tuple(_product(sizes, factors) for factors in dims), dtype, grad)
            for dims, dtype, grad in self.tensors
        )
        return Call(self.target, self.args, self.kwargs, given)


def form_of(op: Op, rule: Rule, graph: Graph) -> Form | None:
    """The form of `op`; None of one that cannot be called by itself, or draws random numbers."""
    if not op.operands or any(word in op.kind for word in _DRAWING):
        return None
    index = {factor.name: i for i, factor in enumerate(rule.factors)}

    def numbers(dims: Dims) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(index[name] for name in names) for names in dims)

    tensors = tuple(
        (numbers(dims), graph.tensor[name].dtype, graph.tensor[name].requires_grad)
        for name, dims in zip(op.operands, rule.operands, strict=True)
    )
    places = iter(range(len(tensors)))
    args = tuple(_numbered(arg, places) for arg in op.args)
    kwargs = tuple((key, _numbered(value, places)) for key, value in op.kwargs)
    return Form(op.target, args, kwargs, tensors)


def timed(
    formula: NDArray[np.float64],
    form: Form,
    sizes: NDArray[np.int64],
    timings: tuple[Timing, ...],
    same: NDArray[np.bool_],
    *,
    backward: bool = False,
) -> NDArray[np.float64]:
    """Seconds by timings where there are some, and by the `formula` as far as they bear it out.

    `same` says at which sizes the operator is this call, and no other that knows its place.
    """
    known = by_call(timings)
    found = [known.get(str(form.at(column))) for column in sizes.T.tolist()]
    there = np.array([timing is not None for timing in found]) & same
    if not there.any():
        return formula
    measured = np.array(
        [0.0 if t is None else t.backward if backward else t.forward for t in found]
    )
    both = there & (measured > 0) & (formula > 0)
    off = np.exp(np.mean(np.log(measured[both] / formula[both]))) if both.any() else 1.0
    return np.where(there, measured, formula * off)


def _numbered(arg: Arg, places: Iterator[int]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(str(next(places)))
    if isinstance(arg, tuple):
        return tuple(_numbered(one, places) for one in arg)
    return arg


def _product(sizes: Sequence[int], factors: Sequence[int]) -> int:
    total = 1
    for factor in factors:
        total *= sizes[factor]
    return total
