"""Memory that the optimizer's update takes beside parameters, gradients and state.

Read off `torch.optim`'s implementations, one parameter after the other or all at once (`foreach`,
the default for plain tensors on a GPU), without weight decay that is added to gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

# Temporaries of a parameter's size that are alive at once, in the update of one parameter.
_ONE_BY_ONE = {
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 4,
    "adamax": 1,
    "adagrad": 1,
    "rmsprop": 1,
}
# And of the size of all parameters, where they are updated at once.
_TOGETHER = {"adam": 1, "adamw": 1, "nadam": 1, "radam": 2, "adamax": 1, "adagrad": 1, "rmsprop": 1}


def update_bytes(optimizer: str, tiles: Sequence[int], *, together: bool = False) -> int:
    """Bytes to update parameters whose tiles have so many bytes each.

    >>> update_bytes("adamw", [100, 300]), update_bytes("sgd", [100, 300])
    (600, 0)
    """
    kind = optimizer.lower()
    if together:
        return _TOGETHER.get(kind, 0) * sum(tiles)
    return _ONE_BY_ONE.get(kind, 0) * max(tiles, default=0)
