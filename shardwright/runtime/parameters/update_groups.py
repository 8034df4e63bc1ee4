"""Updates parameters in groups: the optimizer steps through groups as through `param_groups`.

An optimizer of `torch.optim` with `foreach` makes temporaries of all parameters of one of its
`param_groups` at a time. During a step these are replaced by smaller ones with the same
hyperparameters. The update of an element depends on nothing else, so the numbers are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.ir.options.optimizers import OPTIMIZERS

# Classes that read and write no state but that of each parameter, nor their own `param_groups`.
_SEPARATE = frozenset(
    getattr(torch.optim, spec.torch_class) for spec in OPTIMIZERS.values() if spec.matrix is None
)
_groups: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], ...]] = WeakKeyDictionary()
_whole: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()  # during a step


def update_in_groups(module: nn.Module, groups: Sequence[tuple[str, ...]]) -> None:
    """From now on update the parameters of `module`, by name, group by group."""
    if len(groups) > 1:
        _groups[module] = tuple(groups)


def split_groups(optimizer: Optimizer) -> None:
    """Split the optimizer's `param_groups` for a step; `join_groups` ends it.

    An optimizer of a class whose updates may depend on each other is left as it is, with a warning.
    """
    join_groups(optimizer)  # after an error in the step before
    if not _groups or torch.compiler.is_compiling():
        return
    numbers = {
        id(module.get_parameter(name)): number
        for module, groups in _groups.items()
        for number, names in enumerate(groups)
        for name in names
    }
    given = optimizer.param_groups
    parts = [part for group in given for part in _parts(group, numbers)]
    if len(parts) == len(given):
        return
    if type(optimizer) not in _SEPARATE:
        warnings.warn(
            f"{type(optimizer).__name__} updates all parameters at once, and the plan does it in"
            " groups; it may need more memory than predicted",
            stacklevel=2,
        )
        return
    _whole[optimizer] = given
    optimizer.param_groups = parts


def join_groups(optimizer: Optimizer) -> None:
    """End what `split_groups` began."""
    whole = _whole.pop(optimizer, None)
    if whole is not None:
        optimizer.param_groups = whole


def _parts(group: dict[str, Any], numbers: dict[int, int]) -> Iterator[dict[str, Any]]:
    """The group in parts by the numbers of its parameters; whole if it has no temporaries of all.

    Parameters without a number are a part of their own.
    """
    if group.get("fused") or group.get("foreach") is False:
        yield group
        return
    found: dict[int | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        found.setdefault(numbers.get(id(parameter)), []).append(parameter)
    for parameters in found.values():
        yield {**group, "params": parameters}
