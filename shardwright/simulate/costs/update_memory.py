"""Memory of the optimizer's update beside parameters, gradients and state."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.options.optimizers import optimizer_spec


def update_bytes(optimizer: str, tiles: Sequence[int], *, together: bool = False) -> int:
    """Bytes to update parameters whose tiles have so many bytes each.

    >>> update_bytes("adamw", [100, 300]), update_bytes("sgd", [100, 300])
    (600, 0)
    """
    spec = optimizer_spec(optimizer)
    if together:
        return spec.foreach_temporaries * sum(tiles)
    return spec.temporaries * max(tiles, default=0)
