"""Mesh axes of a strategy, each named by its role."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.layout import Mesh
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy

EXPERTS = "ep"
SHARDING = ("dp_shard", "cp")  # axes over which parameters are sharded


@dataclass(frozen=True, slots=True)
class RoleAxis:
    """One mesh axis: its name and size, and its role in dense layers.

    Attributes:
        name: its name.
        size: devices along it.
        role: its role in dense layers.
        experts: whether experts are split along it.
        whole_experts: whether it splits features everywhere but in experts.
    """

    name: str
    size: int
    role: str
    experts: bool = False
    whole_experts: bool = False


def role_axes(strategy: Strategy) -> tuple[RoleAxis, ...]:
    """The mesh axes of one group of devices (a pipeline stage), outer to inner.

    Experts are split over the innermost ranks, outside of those of `tp` if `etp` equals `tp`. An
    axis with more ranks than that is split in two, and its inner part is named `ep`. Raises
    `StrategyError` if the degrees do not nest.
    """
    dense = [(name, degree) for name, degree in strategy.axes if name != "pp"]
    if strategy.expert_tensor not in (1, strategy.tp):
        raise _refused(strategy)
    split = strategy.expert_tensor == strategy.tp  # experts by features, as dense layers are
    left, found = strategy.ep, list[RoleAxis]()
    for name, degree in reversed(dense):
        whole = name == "tp" and not split
        if left == 1 or name == "dp_replicate" or (name == "tp" and split):
            found.append(RoleAxis(name, degree, name, whole_experts=whole))
        elif left % degree == 0:
            found.append(RoleAxis(name, degree, name, experts=True))
            left //= degree
        elif degree % left == 0:
            found.append(RoleAxis(EXPERTS, left, name, experts=True))
            found.append(RoleAxis(name, degree // left, name, whole_experts=whole))
            left = 1
        else:
            raise _refused(strategy)
    if left > 1:
        raise _refused(strategy)
    return tuple(reversed(found))


def nests(strategy: Strategy) -> bool:
    """Whether the degrees of experts nest in those of the other axes."""
    try:
        role_axes(strategy)
    except StrategyError:
        return False
    return True


def mesh_of(axes: tuple[RoleAxis, ...]) -> Mesh:
    """The mesh of one group of devices; a single device gets one axis of size 1."""
    return Mesh(tuple((axis.name, axis.size) for axis in axes) or (("dp_shard", 1),))


def _refused(strategy: Strategy) -> StrategyError:
    inner = " x ".join(f"{name}={degree}" for name, degree in strategy.axes if name != "pp")
    return StrategyError(
        f"ep={strategy.ep} with etp={strategy.expert_tensor} takes no whole inner part of {inner};"
        f" use ep=1, etp={strategy.tp} with an ep that divides cp x dp_shard, or etp=1 with an ep"
        f" that is a multiple of tp={strategy.tp}"
    )
