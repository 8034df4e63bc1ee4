"""Names of torch that are not public and have no public counterpart; no other file has them.

Except lists of hooks, in `gradients/hooks.py`, and fields of DTensors, in
`runtime/parameters/dtensor_spec.py` and `dtensor_access.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with every write to the memory of `tensor`.

    Raises `RuntimeError` for a tensor that was made in inference mode, which counts no writes.
    """
    return tensor._version


def note_torch_functions() -> None:
    """Have torch's compiler note the identities of torch's own functions, which it does once.

    While some are patched it would note their patches, and no longer know the functions after it.
    """
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()


@contextmanager
def without_function_modes(package: str) -> Iterator[None]:
    """A context in which the modes of `package` for torch functions are not active."""
    before = _get_current_function_mode_stack()
    kept = [mode for mode in before if not type(mode).__module__.startswith(package)]
    _exchange(before, kept)
    try:
        yield
    finally:
        _exchange(kept, before)


def _exchange(old: list[TorchFunctionMode], new: list[TorchFunctionMode]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)
