"""Mesh axes of a strategy, each named by its role."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import AXIS, stage_mesh
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy

EXPERTS, FEATURES = "ep", "etp"  # names of inner parts of an axis
SHARDING = ("dp_shard", "cp")  # axes over which parameters are sharded


@dataclass(frozen=True, slots=True)
class RoleAxis:
    """One mesh axis: its name and size, and its role in dense layers.

    Attributes:
        name: its name.
        size: devices along it.
        role: its role in dense layers.
        experts: whether experts are split along it.
        features: whether the features of each expert are split along it.
    """

    name: str
    size: int
    role: str
    experts: bool = False
    features: bool = False

    @property
    def whole_experts(self) -> bool:
        """Whether it splits features everywhere but in experts."""
        return self.role == "tp" and not self.experts and not self.features


def role_axes(strategy: Strategy) -> tuple[RoleAxis, ...]:
    """The mesh axes of one group of devices (a pipeline stage), outer to inner.

    The features of an expert are split as those of dense layers if `etp` equals `tp`, else over the
    `etp` innermost ranks, and experts over the next `ep` ranks, as in Megatron-LM. An axis with
    more ranks than these is split, and its inner parts are named `etp` and `ep`. Raises
    `StrategyError` if the degrees do not nest.
    """
    as_dense = strategy.expert_tensor == strategy.tp
    left = {FEATURES: 1 if as_dense else strategy.expert_tensor, EXPERTS: strategy.ep}
    found = list[RoleAxis]()
    for role, degree in reversed([axis for axis in strategy.axes if axis[0] != "pp"]):
        if role == "tp" and as_dense:
            found.append(RoleAxis(role, degree, role, features=True))
            continue
        rest = degree
        for name, ranks in left.items() if role != "dp_replicate" else ():
            size = math.gcd(rest, ranks)
            if size not in (rest, ranks):
                raise _refused(strategy)
            if size > 1:
                rest //= size
                left[name] //= size
                mine = {"experts": name == EXPERTS, "features": name == FEATURES}
                found.append(RoleAxis(role if rest == 1 else name, size, role, **mine))
            if left[name] > 1:  # the next axis has the others
                break
        if rest > 1:
            found.append(RoleAxis(role, rest, role))
    if max(left.values()) > 1:
        raise _refused(strategy)
    return tuple(reversed(found))


def nests(strategy: Strategy) -> bool:
    """Whether the degrees of experts nest in those of the other axes."""
    try:
        role_axes(strategy)
    except StrategyError:
        return False
    return True


def mesh_of(strategy: Strategy, axes: tuple[RoleAxis, ...]) -> Mesh:
    """The mesh of one group of devices; a single device gets one axis of size 1.

    `axes` are those of `role_axes`.
    """
    sizes = [(axis.name, axis.size) for axis in axes]
    before = strategy.order[: strategy.order.index(AXIS)]
    outer = sum(axis.role in before for axis in axes)
    whole = (*sizes[:outer], (AXIS, strategy.pp), *sizes[outer:])
    return stage_mesh(Mesh(whole)) if sizes else Mesh((("dp_shard", 1),))


def _refused(strategy: Strategy) -> StrategyError:
    inner = " x ".join(f"{name}={degree}" for name, degree in strategy.axes if name != "pp")
    return StrategyError(
        f"ep={strategy.ep} with etp={strategy.expert_tensor} takes no whole inner part of {inner};"
        " experts and their features are split over the innermost ranks but those of dp_replicate,"
        f" so use ep=1, etp={strategy.tp} with an ep that divides cp x dp_shard, or etp=1 with an"
        f" ep that is a multiple of tp={strategy.tp}"
    )
