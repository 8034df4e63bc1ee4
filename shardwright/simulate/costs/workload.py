"""Describes the work of an operator in plain numbers, the input of its cost functions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import ITEM_BYTES, Graph, Op, extra_scales_with, whole_number
from shardwright.ir.options.fp8 import Fp8Recipe
from shardwright.machine.expert_loads import ExpertSkew, busiest_share
from shardwright.program.instructions import has_fused_blocks
from shardwright.rules.mixtures.group_limits import ANY, GroupLimit, group_limit
from shardwright.rules.operators import loss_chunks, mlp_chunks
from shardwright.rules.operators.half_logits import casts_by_rows
from shardwright.rules.operators.loss_chunks import LINEAR_CROSS_ENTROPY
from shardwright.rules.operators.mlp_chunks import CHUNKED_MLP
from shardwright.rules.operators.steps import EVERY, EXPERTS_STEPS, PART
from shardwright.rules.rule import SPREAD, Dims, Rule
from shardwright.simulate.costs.fusion import Fusion
from shardwright.simulate.costs.op_calls import UnsizedCall, form_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# These read only as much of their operands as they return.
_LOOKUPS = frozenset(
    {"embedding", "embedding_bags", "index_select", "gather", "index", "take_along_dim"}
)


# Operators that compute exponentials or similar functions, and whether their backward passes do so
# again.
_FUNCTIONS = {
    "gelu": True, "silu": True, "mish": True, "softplus": True, "elu": True, "celu": True,
    "log_softmax": True, "_log_softmax": True, "cross_entropy_loss": True, "log_sigmoid": True,
    "tanh": False, "sigmoid": False, "exp": False, "expm1": False, "erf": True, "log": False,
    "log1p": False, "sin": True, "cos": True, "softmax": False, "_softmax": False,
    "logsumexp": True,
}  # fmt: skip


# The position of the number of chunks among the arguments of operators that work in chunks.
_CHUNKS = {LINEAR_CROSS_ENTROPY: loss_chunks.CHUNKS, CHUNKED_MLP: mlp_chunks.CHUNKS}


class OperatorClass(Enum):
    """The class of an operator, which decides its efficiency and its formula."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    EXPERTS = "experts"
    CHUNKED_LOSS = "chunked loss"  # a projection and its cross entropy, in chunks
    CHUNKED_MLP = "chunked mlp"  # the products of an MLP and what is between them, in chunks
    CAST_LOSS = "cast loss"  # a cross entropy that casts half-precision logits to float32
    MEMORY = "memory"
    FUNCTION = "function"  # more than memory traffic: exponentials and similar functions
    POOLING = "pooling"
    VIEW = "view"  # the same elements in another shape: no kernel runs
    PART = "part"  # a view of some elements, or of repeated ones: only backward has a kernel


# Products that `torch.set_float32_matmul_precision` is about.
_PRODUCTS = frozenset(
    {
        OperatorClass.MATMUL,
        OperatorClass.EXPERTS,
        OperatorClass.CHUNKED_LOSS,
        OperatorClass.CHUNKED_MLP,
    }
)


@dataclass(frozen=True, slots=True)
class Port:
    """One operand or result in the formulas.

    `factors` are indices of its factors in the rule, `item_bytes` the bytes of an element.
    `requires_grad` and `saved` say whether it needs a gradient, and is saved for the backward pass.
    """

    factors: tuple[int, ...]
    item_bytes: int
    requires_grad: bool
    saved: bool

    def local_bytes(self, sizes: Ints) -> Ints:
        """Bytes of the local tile at local `sizes` of the factors, (factors, K): (K,)."""
        return product_of(sizes, self.factors) * self.item_bytes


@dataclass(frozen=True, slots=True)
class ElementStep:
    """A step between the products of experts or of an MLP, which works element by element.

    `kind` and `again` are as in `Workload`, `tensors` are those that it reads and writes, and
    `sums` those of its operands that another step reads too.
    """

    kind: OperatorClass
    again: bool
    tensors: int
    sums: int


@dataclass(frozen=True, slots=True)
class Fp8Work:
    """The casts of a linear layer, or of a mixture of experts, in 8 bits.

    `casts_input` says whether it is the first that reads its input, `weight_share` is the part of
    the casts of its weight that a micro-batch has.
    """

    recipe: Fp8Recipe
    casts_input: bool
    weight_share: float


@dataclass(frozen=True, slots=True)
class Workload:
    """All properties of an operator that determine its cost, without names.

    Factors, operands and results are given by their indices. `sizes` are the global sizes of the
    factors, `contracted` the operands that a contraction multiplies, and `work` its factors.
    `lookup` says whether only as much of the operands is read as is written. `added` is, for each
    result, the number of its gradients that are added to the first.
    """

    kind: OperatorClass
    dtype: str
    sizes: tuple[int, ...]
    operands: tuple[Port, ...]
    results: tuple[Port, ...]
    contracted: tuple[int, ...]
    work: tuple[int, ...]
    lookup: bool
    extra: Port  # further memory that autograd keeps is proportional to its local size
    causal: tuple[int, ...] = ()  # factors of queries in causal attention
    halves: int = -1  # the factor whose split shares early and late queries evenly (zigzag)
    passed: int = -1  # the factor of keys; if it is split, they are passed around a ring
    fused_blocks: bool = False  # whether GPUs have a fused kernel for each block of a ring
    width: tuple[int, ...] = ()  # factors of the elements of a key
    scores: tuple[tuple[int, ...], ...] = ()  # of fused attention: factors of queries and of keys
    repeats: int = 1  # contractions of `work`
    experts: tuple[int, ...] = ()  # factors of experts, among which the contraction is divided
    rows: tuple[int, ...] = ()  # factors of the second operand of experts
    steps: tuple[ElementStep, ...] = ()  # of experts and MLPs: those between the products
    skew: ExpertSkew = 1.0  # of experts
    routed: tuple[int, ...] = ()  # factors of the rows that may be sent to experts, `SPREAD` last
    limit: GroupLimit = ANY  # of experts: groups in which a token has all of its own
    form: UnsizedCall | None = None  # the call, if the device has timings of it
    added: tuple[int, ...] = ()
    again: bool = False  # whether the backward pass computes its function again
    internal_reductions: tuple[
        int, ...
    ] = ()  # factors that, if split, are reduced within the operator
    fusion: Fusion | None = None  # None: a kernel of its own
    chunks: int = 1  # parts in which a loss or an MLP is computed
    fp8: Fp8Work | None = None  # None: products in the dtype of the operands

    @property
    def read(self) -> Sequence[Port]:
        """The operands that are read from memory."""
        if self.fusion is None:
            return self.operands
        return tuple(
            p for p, own in zip(self.operands, self.fusion.operands, strict=True) if not own
        )

    @property
    def written(self) -> Sequence[Port]:
        """The results that are written to memory."""
        if self.fusion is None:
            return self.results
        return tuple(p for p, own in zip(self.results, self.fusion.results, strict=True) if not own)

    @property
    def launches(self) -> bool:
        """Whether a kernel is launched for it alone or as the first of a fused kernel."""
        return self.fusion is None or not self.fusion.joins

    @property
    def has_backward(self) -> bool:
        results = any(port.requires_grad for port in self.results)
        return results and any(port.requires_grad for port in self.operands)


def workload(
    op: Op,
    rule: Rule,
    graph: Graph,
    known: Collection[str] = (),
    skew: ExpertSkew = 1.0,
    fusion: Fusion | None = None,
    fp8: Fp8Work | None = None,
) -> Workload:
    """The workload of an operator.

    Args:
        op: the operator.
        rule: its rule.
        graph: its graph.
        known: targets of operators that the device has timings of.
        skew: how unevenly experts are chosen, as `Machine.expert_skew`.
        fusion: the savings of a fused kernel. Timings of single operators are not used with it.
        fp8: the casts of products in 8 bits, for which there are no timings either.
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
    names = (*op.operands, *op.outputs)
    return Workload(
        kind=(kind := _class(op, rule, graph)),
        dtype=_computed_in(kind, names, graph),
        sizes=tuple(factor.size for factor in rule.factors),
        operands=operands,
        results=results,
        contracted=_contracted(op, rule, operands, work),
        work=work,
        lookup=op.kind in _LOOKUPS,
        extra=_extra(op, work, list(zip(names, (*operands, *results), strict=True)), graph),
        causal=_causal(op, rule, index, graph),
        halves=index.get("z", -1) if rule.joint_splits else -1,
        passed=index["s"] if rule.joint_splits else -1,
        fused_blocks=bool(rule.joint_splits) and _fused_blocks(op, graph),
        width=tuple(index[name] for name in rule.operands[0][-1]) if rule.joint_splits else (),
        scores=_scores(op, rule, index),
        repeats=1 if "attention" in op.kind else rule.work_repeats,
        experts=tuple(index[name] for name in rule.operands[3][0]) if op.kind == "experts" else (),
        rows=operands[1].factors if op.kind == "experts" else (),
        steps=_steps(op) if op.kind == "experts" or op.target == CHUNKED_MLP else (),
        skew=skew if op.kind == "experts" else 1.0,
        routed=_routed(rule, index),
        limit=group_limit(op, graph) if rule.routes else ANY,
        form=form_of(op, rule, graph) if op.target in known and not (fusion or fp8) else None,
        added=_all_added(op, graph, fusion),
        again=_FUNCTIONS.get(op.kind, False),
        internal_reductions=_internal_reductions(rule, index),
        fusion=fusion,
        chunks=whole_number(op.args[_CHUNKS[op.target]]) if op.target in _CHUNKS else 1,
        fp8=fp8,
    )


def _contracted(
    op: Op, rule: Rule, operands: Sequence[Port], work: tuple[int, ...]
) -> tuple[int, ...]:
    """The operands that are multiplied: not those without a factor of `work` (a bias, a scale)."""
    found = tuple(
        i
        for i, operand in enumerate(operands)
        if i not in rule.additive and set(operand.factors) & set(work)
    )
    return found[:2] if op.target == LINEAR_CROSS_ENTROPY else found  # hidden states and weight


def _all_added(op: Op, graph: Graph, fusion: Fusion | None) -> tuple[int, ...]:
    """Of each result, how many gradients are added up to its own."""
    if fusion is None:
        return tuple(_added(name, graph) for name in op.outputs)
    counts = zip(fusion.added, op.outputs, strict=True)
    return tuple(count * graph.tensor[name].requires_grad for count, name in counts)


def product_of(sizes: Ints, factors: Sequence[int]) -> Ints:
    """The product of rows `factors` of `sizes` (factors, K): (K,). A single row is not copied."""
    if not factors:
        return np.ones(sizes.shape[1], np.int64)
    total: Ints = sizes[factors[0]]
    for factor in factors[1:]:
        total = total * sizes[factor]
    return total


def expert_share(work: Workload, sizes: Ints) -> Floats:
    """The share of all rows that goes to the experts of the busiest device: (K,)."""
    every = product_of(np.array(work.sizes)[:, None], work.experts)
    share: Floats = product_of(sizes, work.experts) / every
    return busiest_share(work.skew, share)


def routed_choices(work: Workload) -> tuple[int, int]:
    """The number of experts, and how many of them a token chooses."""
    every = np.array(work.sizes)[:, None]
    x, picked, *_ = work.operands
    chosen = product_of(every, [f for f in picked.factors if f not in x.factors])
    return int(product_of(every, work.experts)[0]), int(chosen[0])


def routed_bytes(work: Workload, sizes: Ints) -> tuple[Ints, Ints]:
    """Bytes of the rows that the busiest device works on, and of their results: (K,) each.

    There is a row for each token and each of its experts on the device. Results have the dtype of
    rows until they are back, also where sums over experts are wider.
    """
    rows = product_of(sizes, work.routed) * expert_share(work, sizes)
    sent, made = work.operands[0], work.results[0]
    widths = ([f for f in port.factors if f not in work.routed] for port in (sent, made))
    there, back = (
        np.ceil(rows * product_of(sizes, width) * sent.item_bytes).astype(np.int64)
        for width in widths
    )
    return there, back


def _routed(rule: Rule, index: Mapping[str, int]) -> tuple[int, ...]:
    """Factors of the rows of a mixture of experts, one for each token and chosen expert."""
    if not rule.routes:
        return ()
    return (*(index[name] for dims in rule.operands[1] for name in dims), index[SPREAD])


def _internal_reductions(rule: Rule, index: Mapping[str, int]) -> tuple[int, ...]:
    """Factors over which devices reduce within the operator: of cross entropy, the classes."""
    if not rule.internal_reductions:
        return ()
    reduced = {name for dims in rule.internal_reductions for names in dims for name in names}
    given = dict.fromkeys(name for dims in rule.operands for names in dims for name in names)
    return tuple(index[name] for name in given if name not in reduced)


def _added(name: str, graph: Graph) -> int:
    """The number of gradients of a value that are added to the first."""
    if not graph.tensor[name].requires_grad:
        return 0
    readers = (
        op.operands.count(name)
        for op in graph.consumers[name]
        if any(graph.tensor[made].requires_grad for made in op.outputs)
    )
    return max(0, sum(readers) - 1)


def _causal(op: Op, rule: Rule, index: Mapping[str, int], graph: Graph) -> tuple[int, ...]:
    """Factors of the queries of causal attention with equally many queries and keys, else ()."""
    if op.kind != "scaled_dot_product_attention":
        return ()
    flag = op.args[5] if len(op.args) > 5 else dict(op.kwargs).get("is_causal", False)
    query, key = (graph.tensor[name].shape[-2] for name in op.operands[:2])
    return tuple(index[name] for name in rule.operands[0][-2]) if flag and query == key else ()


def _steps(op: Op) -> tuple[ElementStep, ...]:
    """The steps of experts or an MLP (`tracing/rewrites/expert_steps.py`) that run a kernel."""
    found: list[ElementStep] = []
    seen: set[int] = set()
    steps = op.args[mlp_chunks.STEPS if op.target == CHUNKED_MLP else EXPERTS_STEPS]
    for target, args, _ in json.loads(str(steps)):
        if target in (PART, EVERY):
            continue
        given = [arg["value"] for arg in args if isinstance(arg, dict) and "value" in arg]
        name = target.split(".")[1]
        kind = OperatorClass.FUNCTION if name in _FUNCTIONS else OperatorClass.MEMORY
        sums = len(given) - len({*given} - seen)
        seen.update(given)
        found.append(ElementStep(kind, _FUNCTIONS.get(name, False), len(given) + 1, sums))
    return tuple(found)


def _fused_blocks(op: Op, graph: Graph) -> bool:
    query, key, value, *mask = (graph.tensor[name] for name in op.operands)
    widths = key.shape[-1], value.shape[-1]
    return not mask and has_fused_blocks(query.dtype, widths, on_cpu=False)


def _scores(op: Op, rule: Rule, index: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Factors of the queries and of the keys of fused attention, else ()."""
    if op.kind != "scaled_dot_product_attention":
        return ()
    return tuple(tuple(index[name] for name in dims[-2]) for dims in rule.operands[:2])


def _extra(op: Op, work: tuple[int, ...], ports: list[tuple[str, Port]], graph: Graph) -> Port:
    """The tensor to whose local size further memory of autograd is proportional.

    For experts it is a tensor of the factors of their work.
    """
    if op.kind == "experts":
        return Port(work, 1, False, False)
    name = extra_scales_with(op, graph.tensor)
    return next(port for value, port in ports if value == name)


def _computed_in(kind: OperatorClass, names: Sequence[str], graph: Graph) -> str:
    """The dtype that decides the rate of an operator, that of its first operand or result.

    Convolutions of float32 are in TF32 by torch's default, other products where the precision is.
    """
    dtype = graph.tensor[names[0]].dtype if names else "float32"
    in_tf32 = kind in _PRODUCTS and graph.numerics.precision == "tf32"
    if dtype == "float32" and (in_tf32 or kind is OperatorClass.CONVOLUTION):
        return "tf32"
    return dtype


def _class(op: Op, rule: Rule, graph: Graph) -> OperatorClass:
    if op.outputs and all(graph.tensor[name].alias_of for name in op.outputs):
        source = graph.tensor[graph.tensor[op.outputs[0]].alias_of]
        result = graph.tensor[op.outputs[0]]
        same = len(op.outputs) == 1 and result.num_elements == source.num_elements
        return OperatorClass.VIEW if same else OperatorClass.PART
    if casts_by_rows(op, graph.tensor[op.operands[0]].dtype if op.operands else ""):
        return OperatorClass.CAST_LOSS
    if not rule.work:
        if "pool" in op.kind:
            return OperatorClass.POOLING
        return OperatorClass.FUNCTION if op.kind in _FUNCTIONS else OperatorClass.MEMORY
    if op.kind == "experts":
        return OperatorClass.EXPERTS
    if op.target == LINEAR_CROSS_ENTROPY:
        return OperatorClass.CHUNKED_LOSS
    if op.target == CHUNKED_MLP:
        return OperatorClass.CHUNKED_MLP
    if "attention" in op.kind:
        return OperatorClass.ATTENTION
    return OperatorClass.CONVOLUTION if "conv" in op.kind else OperatorClass.MATMUL
