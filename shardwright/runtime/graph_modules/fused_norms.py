"""Finds batch norms whose statistics need no communication, which torch computes in one kernel.

A graph has a batch norm as sums over the batch, a normalisation that reads them, and an update of
the running statistics, because each of them can be split. Where a region has them one after the
other, on all values of each channel, together they are `torch.nn.functional.batch_norm`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.ir.graph import Ref
from shardwright.program.instructions import Compute, Instruction, reads, writes
from shardwright.tracing.export.kernels import statistics_dtype

_Readers = Mapping[str, Sequence[tuple[int, Compute | None]]]  # None: no plain operator


@dataclass(frozen=True, slots=True)
class Buffers:
    """The running statistics of a norm: names of their old values, of the new ones; the momentum.

    Each pair is of mean and variance.
    """

    old: tuple[str, str]
    new: tuple[str, str]
    momentum: float


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """A batch norm: the instruction that normalises, its statistics' buffers, what it replaces.

    `replaced` are the numbers of the other instructions of the region that need not run.
    """

    normalizes: Compute
    buffers: Buffers | None
    replaced: frozenset[int]


def fused_norms(
    instructions: Sequence[Instruction], results: Sequence[str]
) -> dict[int, FusedNorm]:
    """The batch norms of a region that returns `results`, by the number of the normalisation."""
    readers: defaultdict[str, list[tuple[int, Compute | None]]] = defaultdict(list)
    maker: dict[str, int] = {}
    for number, one in enumerate(instructions):
        for name in reads(one):
            readers[name].append((number, one if isinstance(one, Compute) else None))
        maker.update((name, number) for name in writes(one))
    for name in results:
        readers[name].append((len(instructions), None))
    found = {}
    for number, one in enumerate(instructions):
        if isinstance(one, Compute) and one.op.kind == "moments" and not one.regathers:
            pair = _norm_of(number, one, readers, maker)
            if pair is not None:
                found[pair[0]] = pair[1]
    return found


def _norm_of(
    number: int, sums: Compute, readers: _Readers, maker: Mapping[str, int]
) -> tuple[int, FusedNorm] | None:
    """The norm that reads the sums, and its number; None if something else reads them too."""
    x, scale = sums.op.args
    norms: list[tuple[int, Compute]] = []
    others: list[tuple[int, Compute]] = []
    for at, one in readers[sums.op.outputs[0]]:
        if one is None or one.regathers:
            return None
        (norms if one.op.kind == "standardize" else others).append((at, one))
    if len(norms) != 1 or len(others) > 1 or norms[0][1].op.args[0] != x:
        return None
    (at, norm), shape = norms[0], norms[0][1].shapes[0]
    values = torch.Size(shape).numel() // max(1, shape[1])
    if values < 2 or not isinstance(scale, float) or abs(scale * values - 1.0) > 1e-9:
        return None  # a part of the batch, or nothing to normalise
    replaced, buffers = {number}, None
    if others:
        update = _update_of(*others[0], readers)
        if update is None or any(maker.get(name, -1) > at for name in update[0].old):
            return None
        buffers, numbers = update
        replaced |= numbers
    return at, FusedNorm(norm, buffers, frozenset(replaced))


def _update_of(
    number: int, reader: Compute, readers: _Readers
) -> tuple[Buffers, frozenset[int]] | None:
    """The update of running statistics that begins with `reader`, and its instructions' numbers."""
    numbers = {number}
    if reader.op.kind == "detach":
        following = readers[reader.op.outputs[0]]
        if len(following) != 1 or following[0][1] is None:
            return None
        reader = following[0][1]
        numbers.add(following[0][0])
    if reader.op.kind != "statistics":
        return None
    ends = []
    for name in reader.op.outputs:
        if len(readers[name]) != 1:
            return None
        at, one = readers[name][0]
        if one is None or one.op.kind != "lerp" or one.op.args[1] != Ref(name):
            return None
        ends.append(one)
        numbers.add(at)
    mean, variance = ends
    old_mean, old_variance = mean.op.args[0], variance.op.args[0]
    momentum = mean.op.args[2]
    if not isinstance(old_mean, Ref) or not isinstance(old_variance, Ref):
        return None
    if not isinstance(momentum, float) or variance.op.args[2] != momentum:
        return None
    return (
        Buffers(
            (old_mean.name, old_variance.name),
            (mean.op.outputs[0], variance.op.outputs[0]),
            momentum,
        ),
        frozenset(numbers),
    )


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
    momentum: float = 0.0,
) -> tuple[Tensor, ...]:
    """Normalise x (N, C, ...) by its own statistics, then the new running mean and variance.

    `mean` and `variance` are the old ones, (C), and stay what they are. Without them there is one
    result.
    """
    given = [one for one in (weight, bias, mean, variance) if one is not None]
    dtypes, kept = {one.dtype for one in given}, statistics_dtype(x)
    dtype = dtypes.pop() if len(dtypes) == 1 else kept
    if dtype != x.dtype:  # kernels take parameters in the dtype of x or in that of statistics
        dtype = kept
    weight, bias = (None if one is None else one.to(dtype) for one in (weight, bias))
    if mean is None or variance is None:
        return (F.batch_norm(x, None, None, weight, bias, True, momentum, eps),)
    new_mean, new_variance = (one.to(dtype, copy=True) for one in (mean, variance))
    out = F.batch_norm(x, new_mean, new_variance, weight, bias, True, momentum, eps)
    return out, new_mean.to(mean.dtype), new_variance.to(variance.dtype)


def arguments(norm: FusedNorm) -> tuple[Any, ...]:
    """The arguments of `batch_norm`, with references to values."""
    x, _, weight, bias, eps = norm.normalizes.op.args
    if norm.buffers is None:
        return x, weight, bias, eps
    mean, variance = map(Ref, norm.buffers.old)
    return x, weight, bias, eps, mean, variance, norm.buffers.momentum


def results_of(norm: FusedNorm) -> tuple[str, ...]:
    """The names of the results of `batch_norm`."""
    return (*norm.normalizes.op.outputs, *(norm.buffers.new if norm.buffers is not None else ()))
