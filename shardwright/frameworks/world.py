"""The split of ranks that each framework makes of the degrees of a strategy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.frameworks.errors import FrameworkError
from shardwright.ir.strategy.fields import TP_PP_DP
from shardwright.ir.strategy.strategy import Strategy

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class WorldSplit:
    """Meshes over all ranks, outer to inner: ranks along the last axis are neighbours.

    Attributes:
        dense: name and degree of every axis, of attention and dense layers.
        experts: the same of experts, on the same ranks.
    """

    dense: Axes
    experts: Axes

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along every axis of the dense mesh.

        >>> WorldSplit((("dp", 2), ("tp", 4)), ()).coordinates(6)
        {'dp': 1, 'tp': 2}
        """
        return _coordinates(self.dense, rank)

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along every axis of the mesh of experts."""
        return _coordinates(self.experts, rank)


def _coordinates(axes: Axes, rank: int) -> dict[str, int]:
    found = {}
    for name, degree in reversed(axes):
        rank, found[name] = divmod(rank, degree)
    return {name: found[name] for name, _ in axes}


def world_split(framework: str, strategy: Strategy) -> WorldSplit:
    """The meshes that a framework builds for a strategy.

    Raises `FrameworkError` for a framework without one, or an order of axes that it does not have.
    """
    if framework not in _DENSE:
        raise FrameworkError(f"the world split of {framework} is not known")
    degree = {
        **{axis: getattr(strategy, axis) for axis, _ in strategy.axes},
        "ep": strategy.ep,
        "etp": strategy.expert_tensor,
    }
    swapped = tuple(name for name, _ in strategy.axes) != tuple(
        axis for axis in _DENSE[framework] if degree.get(axis, 1) > 1
    )
    outer = _DENSE[framework]
    if swapped and framework in ("megatron", "megatron-bridge"):
        outer = TP_PP_DP
        swapped = tuple(name for name, _ in strategy.axes) != tuple(
            axis for axis in outer if degree.get(axis, 1) > 1
        )
    if swapped:
        raise FrameworkError(
            f"{framework} orders its axes {', '.join(outer)}, not {', '.join(strategy.order)}"
        )
    dense = tuple((axis, degree.get(axis, 1)) for axis in outer)
    return WorldSplit(dense, _expert_axes(framework, strategy, outer))


_DENSE = {
    **dict.fromkeys(
        ("torchtitan", "megatron", "megatron-bridge"),
        ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    ),
    # A pipeline is none of accelerate's axes; DeepSpeed's sequence parallelism is `cp` here.
    **dict.fromkeys(("accelerate", "trainer"), ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
    "deepspeed": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
}


def _expert_axes(framework: str, strategy: Strategy, outer: tuple[str, ...]) -> Axes:
    """The mesh of experts: replicas of them outside, then expert and expert-tensor parallelism."""
    ep, etp = strategy.ep, strategy.expert_tensor
    ranks = strategy.devices // strategy.pp
    if framework in ("megatron", "megatron-bridge", "deepspeed"):
        inside: Axes = (("edp", ranks // (ep * etp)), ("ep", ep), ("etp", etp))
        pipeline = (("pp", strategy.pp),)
        if outer[0] == "pp":
            return (*pipeline, *inside)
        return (inside[0], *pipeline, *inside[1:])
    sharded = math.prod((strategy.dp_shard, strategy.cp, strategy.tp))
    if sharded % (ep * etp):
        raise FrameworkError(
            f"ep={ep} x etp={etp} does not divide the {sharded} ranks of dp_shard x cp x tp"
        )
    rows: Axes = (("efsdp", sharded // (ep * etp)), ("ep", ep))
    tail: Axes = (("etp", etp),) if etp > 1 else ()
    return (("pp", strategy.pp), ("dp_replicate", strategy.dp_replicate), *rows, *tail)
