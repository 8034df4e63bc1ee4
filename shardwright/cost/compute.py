"""Seconds that one operator keeps a device busy, forward and backward (a roofline).

A kernel takes `max(flop / (peak · efficiency), bytes / bandwidth) + launch`, where efficiency may
depend on the kernel's size (Williams, Waterman and Patterson, "Roofline", 2009). A contraction has
2 · Π(sizes of the factors in `rule.work`) flop forward, and as many again for
every contracted operand that needs a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.calls import Form, form_of, timed
from shardwright.ir.curve import Curve
from shardwright.ir.graph import ITEM_BYTES, Graph, Op, extra_scales_with
from shardwright.ir.machine import Device
from shardwright.rules.rule import SPREAD, Dims, Rule

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class OperatorClass(Enum):
    """What limits an operator, and so which efficiency applies."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    EXPERTS = "experts"
    MEMORY = "memory"
    VIEW = "view"  # the same elements under another shape: no kernel runs
    PART = "part"  # a view of some elements, or of some repeatedly: only its backward runs


# Contractions of `rule.work` in fused attention: Q·Kᵀ and P·V; backward five,
# as the scores are computed again (Dao et al., "FlashAttention", 2022).
_ATTENTION_FORWARD, _ATTENTION_BACKWARD = 2, 5
_PASSES_OF_SUM = 3  # over memory: both terms are read, the sum is written
# Bytes of traffic for each score of a ring, forward; backward twice as much: written, read to be
# exponentiated, and read to be multiplied, in single precision.
_SCORE_BYTES = 12
_EXPERTS_BACKWARD = 2  # of each product one for its rows and one for its weights
# These read as much of their operands as they return, not all of it.
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index", "take_along_dim"})


@dataclass(frozen=True, slots=True)
class Port:
    """One operand or result as the formulas see it; factors by their index in the rule."""

    factors: tuple[int, ...]
    item_bytes: int
    requires_grad: bool
    saved: bool

    def local_bytes(self, sizes: Ints) -> Ints:
        """Bytes of the local part, of factors with local sizes (factors, K): (K,)."""
        return product_of(sizes, self.factors) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything of an operator that its cost depends on, and no names: equal ones cost the same.

    `sizes` are the global sizes of the factors, `contracted` the operands that
    a contraction multiplies, `work` its factors. `added` says of each result how many gradients
    come back for it beyond the first, which are added to that.
    """

    kind: OperatorClass
    dtype: str
    sizes: tuple[int, ...]
    operands: tuple[Port, ...]
    results: tuple[Port, ...]
    contracted: tuple[int, ...]
    work: tuple[int, ...]
    lookup: bool
    extra: Port  # what autograd keeps besides is as much less as this is
    causal: tuple[int, ...] = ()  # factors of queries that see the keys up to their own place
    halves: int = -1  # the factor that is cut where early and late queries are shared evenly
    passed: int = -1  # the factor of keys that are passed around, where it is cut
    width: tuple[int, ...] = ()  # factors of a key's elements
    repeats: int = 1  # of the contraction
    experts: tuple[int, ...] = ()  # factors of experts, which share the work of `work`
    skew: float = 1.0  # of experts: rows of the busiest device over those of the mean
    routed: tuple[int, ...] = ()  # factors of the rows that may be sent to experts, `SPREAD` last
    form: Form | None = None  # of operators that the device has timings of
    added: tuple[int, ...] = ()

    @property
    def has_backward(self) -> bool:
        results = any(port.requires_grad for port in self.results)
        return results and any(port.requires_grad for port in self.operands)


def workload(
    op: Op, rule: Rule, graph: Graph, known: Collection[str] = (), skew: float = 1.0
) -> Workload:
    """The workload of `op`; `known` are the operators that the device has timings of.

    `skew` is how many more rows than the mean the busiest of devices has that hold different
    experts.
    """
    index = {factor.name: i for i, factor in enumerate(rule.factors)}

    def port(name: str, dims: Dims) -> Port:
        tensor = graph.tensor[name]
        factors = tuple(index[factor] for names in dims for factor in names)
        item = ITEM_BYTES[tensor.dtype]
        return Port(factors, item, tensor.requires_grad, name in op.saves)

    operands = tuple(port(n, dims) for n, dims in zip(op.operands, rule.operands, strict=True))
    results = tuple(port(n, dims) for n, dims in zip(op.outputs, rule.results, strict=True))
    work = tuple(index[name] for name in rule.work)
    # Operands without a factor of the contraction (a bias, a scale) are not multiplied by it.
    contracted = tuple(
        i
        for i, operand in enumerate(operands)
        if i not in rule.additive and set(operand.factors) & set(work)
    )
    names = (*op.operands, *op.outputs)
    return Workload(
        kind=_class(op, rule, graph),
        dtype=graph.tensor[names[0]].dtype if names else "float32",
        sizes=tuple(factor.size for factor in rule.factors),
        operands=operands,
        results=results,
        contracted=contracted,
        work=work,
        lookup=op.kind in _LOOKUPS,
        extra=_extra(op, work, list(zip(names, (*operands, *results), strict=True)), graph),
        causal=_causal(op, rule, index, graph),
        halves=index.get("z", -1) if rule.together else -1,
        passed=index["s"] if rule.together else -1,
        width=tuple(index[name] for name in rule.operands[0][-1]) if rule.together else (),
        repeats=1 if "attention" in op.kind else rule.work_repeats,
        experts=tuple(index[name] for name in rule.operands[3][0]) if op.kind == "experts" else (),
        skew=skew if op.kind == "experts" else 1.0,
        routed=_routed(rule, index),
        form=form_of(op, rule, graph) if op.target in known else None,
        added=tuple(_added(name, graph) for name in op.outputs),
    )


def operator_seconds(work: Workload, sizes: Ints, device: Device) -> Floats:
    """Seconds forward and backward with factors of local `sizes` (factors, K): (K,)."""
    seconds = forward_seconds(work, sizes, device)
    return seconds + backward_seconds(work, sizes, device) if work.has_backward else seconds


def forward_seconds(work: Workload, sizes: Ints, device: Device) -> Floats:
    """Seconds of the forward kernel with factors of local `sizes` (factors, K): (K,)."""
    found = _forward(work, sizes, device)
    if work.form is None:
        return found
    return timed(found, work.form, sizes, device.timings, _as_one(work, sizes))


def _forward(work: Workload, sizes: Ints, device: Device) -> Floats:
    if work.kind in (OperatorClass.VIEW, OperatorClass.PART):
        return np.zeros(sizes.shape[1])
    written = _bytes(work.results, sizes)
    read = _bytes(work.operands, sizes)
    if work.lookup:
        read = np.minimum(read, written * len(work.operands))
    if work.kind is OperatorClass.ATTENTION:
        flop = _ATTENTION_FORWARD * _flop(work, sizes)
        return _kernel(work, flop, read + written + _scores(work, sizes), device)
    return _kernel(work, _flop(work, sizes), read + written, device)


def backward_seconds(work: Workload, sizes: Ints, device: Device) -> Floats:
    """Seconds of the backward kernels, of those operands only that need a gradient: (K,).

    With those that add up the gradients of a result that several operators read.
    """
    found = _backward(work, sizes, device)
    if work.form is not None:
        own = _as_one(work, sizes)
        found = timed(found, work.form, sizes, device.timings, own, backward=True)
    for result, more in zip(work.results, work.added, strict=False):
        if more:
            moved = _PASSES_OF_SUM * result.local_bytes(sizes)
            waiting = moved / (device.bytes_per_s * reached_at(device.efficiency.memory, moved))
            found = found + more * (waiting + device.launch_seconds)
    return found


def _backward(work: Workload, sizes: Ints, device: Device) -> Floats:
    needed = [i for i, port in enumerate(work.operands) if port.requires_grad]
    given = _bytes((port for port in work.results if port.requires_grad), sizes)
    made = _bytes((work.operands[i] for i in needed), sizes)
    nothing = np.zeros(sizes.shape[1], np.int64)
    if work.kind is OperatorClass.VIEW:
        return np.zeros(sizes.shape[1])
    if work.kind in (OperatorClass.MEMORY, OperatorClass.PART):
        saved = (port for port in (*work.operands, *work.results) if port.saved)
        return _kernel(work, nothing, given + made + _bytes(saved, sizes), device)
    flop = _flop(work, sizes)
    if work.kind is OperatorClass.EXPERTS:
        moved = given + made + _bytes((*work.operands, *work.results), sizes)
        return _kernel(work, _EXPERTS_BACKWARD * flop, moved, device)
    if work.kind is OperatorClass.ATTENTION:
        moved = given + made + _bytes((*work.operands, *work.results), sizes)
        moved = moved + 2 * _scores(work, sizes)
        return _kernel(work, _ATTENTION_BACKWARD * flop, moved, device)
    seconds = np.zeros(sizes.shape[1])
    for i in needed:
        own = work.operands[i].local_bytes(sizes)
        if i in work.contracted:
            others = _bytes((work.operands[j] for j in work.contracted if j != i), sizes)
            seconds += _kernel(work, flop, given + others + own, device)
        else:
            seconds += _kernel(work, nothing, given + own, device)
    return seconds


def _as_one(work: Workload, sizes: Ints) -> Bools:
    """Where one device would make the very call at these sizes: no tile that knows its place."""
    placed = [*work.causal, *([work.passed] if work.passed >= 0 else [])]
    whole = np.array(work.sizes)[placed]
    found: Bools = (sizes[placed] == whole[:, None]).all(axis=0)
    return found


def product_of(sizes: Ints, factors: Iterable[int]) -> Ints:
    """Product of some rows of `sizes` (factors, K): (K,)."""
    total = np.ones(sizes.shape[1], np.int64)
    for factor in factors:
        total = total * sizes[factor]
    return total


def _kernel(work: Workload, flop: Ints, moved: Ints, device: Device) -> Floats:
    efficiency = device.efficiency
    reached = {
        OperatorClass.MATMUL: efficiency.matmul,
        OperatorClass.EXPERTS: efficiency.matmul,
        OperatorClass.CONVOLUTION: efficiency.convolution,
        OperatorClass.ATTENTION: efficiency.attention,
    }.get(work.kind, 1.0)
    busy = flop / (device.peak_flop_per_s(work.dtype) * reached_at(reached, flop))
    waiting = moved / (device.bytes_per_s * reached_at(efficiency.memory, moved))
    return np.maximum(busy, waiting) + device.launch_seconds


def reached_at(part: float | Curve, work: Ints) -> Floats | float:
    """The part that is reached with so much work: (K,) -> (K,); `Curve.at` for many."""
    if not isinstance(part, Curve):
        return part
    works, parts = np.log(part.points).T
    found: Floats = np.exp(np.interp(np.log(np.maximum(work, 1)), works, parts))
    return found


def _flop(work: Workload, sizes: Ints) -> Ints:
    if not work.work:
        return np.zeros(sizes.shape[1], np.int64)
    flop = 2 * work.repeats * product_of(sizes, work.work)
    if work.experts:
        flop = (flop * expert_share(work, sizes)).astype(np.int64)
    if work.causal:
        # The last device is the slowest: its queries see all keys but, on average, half of its own.
        queries = product_of(np.array(work.sizes)[:, None], work.causal)
        share = product_of(sizes, work.causal) / queries
        if work.halves >= 0:  # evenly between those that share it
            share = np.minimum(1.0, share * work.sizes[work.halves] / sizes[work.halves])
        flop = flop - (flop * (share / 2)).astype(np.int64)
    if work.passed >= 0:  # all keys come by
        flop = (flop * (work.sizes[work.passed] / sizes[work.passed])).astype(np.int64)
    return flop


def _scores(work: Workload, sizes: Ints) -> Ints:
    """Bytes of scores that a ring writes and reads: it adds up blocks without a fused kernel."""
    if work.passed < 0:
        return np.zeros(sizes.shape[1], np.int64)
    scores = _flop(work, sizes) // (2 * work.repeats * product_of(sizes, work.width))
    found: Ints = np.where(sizes[work.passed] < work.sizes[work.passed], _SCORE_BYTES * scores, 0)
    return found


def _bytes(ports: Iterable[Port], sizes: Ints) -> Ints:
    total = np.zeros(sizes.shape[1], np.int64)
    for port in ports:
        total = total + port.local_bytes(sizes)
    return total


def expert_share(work: Workload, sizes: Ints) -> Floats:
    """The share of the rows there are that goes to the experts of the busiest device: (K,)."""
    every = product_of(np.array(work.sizes)[:, None], work.experts)
    share: Floats = product_of(sizes, work.experts) / every
    return np.where(share < 1.0, np.minimum(1.0, share * work.skew), share)


def routed_bytes(work: Workload, sizes: Ints) -> tuple[Ints, Ints]:
    """Bytes that the busiest device is sent of rows of the first operand, and of results: (K,)."""
    rows = product_of(sizes, work.routed) * expert_share(work, sizes)
    sent, made = work.operands[0], work.results[0]
    widths = ([f for f in port.factors if f not in work.routed] for port in (sent, made))
    there, back = (
        np.ceil(rows * product_of(sizes, width) * port.item_bytes).astype(np.int64)
        for width, port in zip(widths, (sent, made), strict=True)
    )
    return there, back


def _routed(rule: Rule, index: Mapping[str, int]) -> tuple[int, ...]:
    """Of a mixture of experts: each token is a row for each expert that it chose."""
    if not rule.routes:
        return ()
    return (*(index[name] for dims in rule.operands[1] for name in dims), index[SPREAD])


def _added(name: str, graph: Graph) -> int:
    """Gradients that come back for a value beyond the first."""
    if not graph.tensor[name].requires_grad:
        return 0
    readers = (
        op.operands.count(name)
        for op in graph.consumers[name]
        if any(graph.tensor[made].requires_grad for made in op.outputs)
    )
    return max(0, sum(readers) - 1)


def _causal(op: Op, rule: Rule, index: Mapping[str, int], graph: Graph) -> tuple[int, ...]:
    """The queries' factors of a causal attention over as many keys."""
    if op.kind != "scaled_dot_product_attention":
        return ()
    flag = op.args[5] if len(op.args) > 5 else dict(op.kwargs).get("is_causal", False)
    query, key = (graph.tensor[name].shape[-2] for name in op.operands[:2])
    return tuple(index[name] for name in rule.operands[0][-2]) if flag and query == key else ()


def _extra(op: Op, work: tuple[int, ...], ports: list[tuple[str, Port]], graph: Graph) -> Port:
    """What autograd keeps besides is as much less as this. Of experts all that is inside."""
    if op.kind == "experts":
        return Port(work, 1, False, False)
    name = extra_scales_with(op, graph.tensor)
    return next(port for value, port in ports if value == name)


def _class(op: Op, rule: Rule, graph: Graph) -> OperatorClass:
    if op.outputs and all(graph.tensor[name].alias_of for name in op.outputs):
        source = graph.tensor[graph.tensor[op.outputs[0]].alias_of]
        result = graph.tensor[op.outputs[0]]
        same = len(op.outputs) == 1 and result.num_elements == source.num_elements
        return OperatorClass.VIEW if same else OperatorClass.PART
    if not rule.work:
        return OperatorClass.MEMORY
    if op.kind == "experts":
        return OperatorClass.EXPERTS
    if "attention" in op.kind:
        return OperatorClass.ATTENTION
    return OperatorClass.CONVOLUTION if "conv" in op.kind else OperatorClass.MATMUL
