"""Derives the roles of a plan's mesh axes from the choices of its operators and parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache

from shardwright.ir.layout import Shard
from shardwright.ir.plan import Plan, PlannedOp

MIXED = ""  # the role of an axis along which modules do different things
IDLE = "repeated"  # the role of an axis along which nothing is split
# Fractions of the compute time that is split along an axis.
_SAME = 0.95  # a role that covers this much is the role of the axis
_SOME = 0.02  # this much on experts, or on inner features, already decides the role
_DIMENSIONS = {
    "batch": "data",
    "sequence": "sequence",
    "experts": "experts",
    "batch to experts": "experts",
}


@dataclass(frozen=True, slots=True)
class AxisUse:
    """The use of one mesh axis, as shares of the compute time that is split along it.

    Attributes:
        data: the share that splits the batch.
        sequence: the share that splits the sequence.
        experts: the share that routes rows to experts.
        features: the share that splits heads, inner features or the vocabulary.
        heads: of `features`, the share of attention by heads.
        sharded: the share of parameter bytes, among those outside of experts and tensor
            parallelism, that are sharded along the axis.
    """

    data: float = 0.0
    sequence: float = 0.0
    experts: float = 0.0
    features: float = 0.0
    heads: float = 0.0
    sharded: float = 0.0

    @property
    def role(self) -> str:
        """The role that nearly all operators give the axis; `MIXED` or `IDLE` if there is none.

        Tensor parallelism may also split the sequence between layers (sequence parallelism), and
        context parallelism the heads in attention (Ulysses). An axis that splits experts has the
        role `ep` unless dense layers split their features along it.
        """
        data = "dp_shard" if self.is_sharded else "dp_replicate"
        if not self.data + self.sequence + self.experts + self.features:
            return IDLE
        if self.experts > _SOME and self.features <= _SOME:
            return "ep"
        if self.data >= _SAME:
            return data
        if (
            self.sequence + self.heads >= _SAME
            and self.features - self.heads <= _SOME < self.sequence
        ):
            return "cp"
        if self.data <= 1 - _SAME and self.features > _SOME:
            return "tp"
        return MIXED

    @property
    def is_sharded(self) -> bool:
        """Whether most bytes of parameters are sharded along the axis, as under FSDP."""
        return self.sharded > 1 / 2

    @property
    def main_role(self) -> str:
        """The role that most operators give the axis."""
        if self.role not in (MIXED, IDLE):
            return self.role
        if self.data >= max(self.features, self.sequence):
            return "dp_shard" if self.is_sharded else "dp_replicate"
        return "tp" if self.features >= self.sequence else "cp"


def axis_uses(plan: Plan) -> tuple[AxisUse, ...]:
    """The uses of the axes of `plan.layout_mesh`."""
    axes = range(len(plan.layout_mesh.axes))
    return tuple(_use(plan, axis) for axis in axes)


def dimension_of(op: PlannedOp, axis: int) -> str:
    """The role of an operator along an axis: data, sequence, experts, features, or "" for none."""
    return _dimension(op.splits[axis])


@cache
def _dimension(word: str) -> str:
    if word in ("-", "partial sums"):
        return ""
    return _DIMENSIONS.get(word.split(" (")[0], "features")


def _use(plan: Plan, axis: int) -> AxisUse:
    seconds, heads = defaultdict[str, float](float), 0.0
    for op in plan.ops:
        what = dimension_of(op, axis)
        seconds[what] += op.seconds
        if what == "features" and "attention" in op.target:
            heads += op.seconds
    seconds.pop("", None)
    total = sum(seconds.values())
    shares = {what: spent / total for what, spent in seconds.items()} if total else {}
    sizes = Counter[bool]()
    for parameter in plan.parameters:
        placement = parameter.layout.placements[axis]
        sizes[isinstance(placement, Shard)] += _whole_bytes(parameter.bytes, placement, plan, axis)
    stored = sum(sizes.values())
    return AxisUse(
        **shares,
        heads=heads / total if total else 0.0,
        sharded=sizes[True] / stored if stored else 0.0,
    )


def _whole_bytes(size: int, placement: object, plan: Plan, axis: int) -> int:
    """Bytes of a parameter before it is split along `axis`; `size` are the bytes of a rank."""
    return size * plan.layout_mesh.shape[axis] if isinstance(placement, Shard) else size
