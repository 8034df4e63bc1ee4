"""Names of torch that are not public and have no public counterpart; no other file has them.

Except lists of hooks, in `gradients/hooks.py`, and fields of DTensors, in
`runtime/parameters/dtensor_spec.py` and `dtensor_access.py`.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with every write to the memory of `tensor`.

    Raises `RuntimeError` for a tensor that was made in inference mode, which counts no writes.
    """
    return tensor._version
