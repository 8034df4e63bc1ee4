"""Updates parameters in groups: the optimizer steps through groups as through `param_groups`.

An optimizer of `torch.optim` with `foreach` makes temporaries of all parameters of one of its
`param_groups` at a time. During a step these are replaced by smaller ones with the same
hyperparameters. The update of an element depends on nothing else, so the numbers are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.ir.options.optimizers import OPTIMIZERS
from shardwright.ir.plan import PlanError
from shardwright.program.step.step_program import UpdateParts
from shardwright.runtime.parameters.host_state import StreamedGroups

# Classes that read and write no state but that of each parameter, nor their own `param_groups`.
_SEPARATE = frozenset(
    getattr(torch.optim, spec.torch_class) for spec in OPTIMIZERS.values() if spec.matrix is None
)
_parts: WeakKeyDictionary[nn.Module, UpdateParts] = WeakKeyDictionary()
_whole: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()  # during a step


def update_in_groups(module: nn.Module, parts: UpdateParts) -> None:
    """From now on update the parameters of `module` group by group, with the state where it is."""
    if len(parts.groups) > 1 or parts.on_host:
        _parts[module] = parts


def streamed_parameters() -> frozenset[int]:
    """The parameters, by id, whose state is kept on the host."""
    return frozenset(
        id(module.get_parameter(name))
        for module, parts in _parts.items()
        if parts.on_host
        for names in parts.groups
        for name in names
    )


def split_groups(optimizer: Optimizer) -> None:
    """Split the optimizer's `param_groups` for a step; `join_groups` ends it.

    An optimizer of a class whose updates may depend on each other is left as it is, with a warning.
    """
    join_groups(optimizer)  # after an error in the step before
    if not _parts:
        return
    if torch.compiler.is_compiling():
        if streamed_parameters():
            raise PlanError(
                "a compiled step of the optimizer does not copy its state from the host; call step"
                " without torch.compile, or take offload=optimizer out of the plan"
            )
        return
    numbers = {
        id(module.get_parameter(name)): number
        for module, parts in _parts.items()
        for number, names in enumerate(parts.groups)
        for name in names
    }
    given, streamed = optimizer.param_groups, streamed_parameters()
    found = [part for group in given for part in _parts_of(group, numbers, streamed)]
    if not streamed.isdisjoint(id(one) for group in given for one in group["params"]):
        _require_separate(optimizer)
        _whole[optimizer] = given
        optimizer.param_groups = StreamedGroups(optimizer, found, streamed)
        return
    if len(found) == len(given):
        return
    if type(optimizer) not in _SEPARATE:
        warnings.warn(
            f"{type(optimizer).__name__} updates all parameters at once, and the plan does it in"
            " groups; it may need more memory than predicted",
            stacklevel=2,
        )
        return
    _whole[optimizer] = given
    optimizer.param_groups = found


def join_groups(optimizer: Optimizer) -> None:
    """End what `split_groups` began."""
    whole = _whole.pop(optimizer, None)
    if whole is not None:
        optimizer.param_groups = whole


def _require_separate(optimizer: Optimizer) -> None:
    """Raise `PlanError` for an optimizer that does not update parameters independently."""
    if type(optimizer) not in _SEPARATE:
        having = ", ".join(sorted(one.__name__ for one in _SEPARATE))
        raise PlanError(
            f"the plan keeps optimizer state on the host, and {type(optimizer).__name__} may need"
            f" that of several parameters at once; use one of {having}, or take"
            " offload=optimizer out of the plan"
        )


def _parts_of(
    group: dict[str, Any], numbers: dict[int, int], streamed: Collection[int]
) -> Iterator[dict[str, Any]]:
    """The group in parts by the numbers of its parameters; whole if it has no temporaries of all.

    State that is copied from the host is divided in any case. Parameters without a number are a
    part of their own.
    """
    copied = any(id(parameter) in streamed for parameter in group["params"])
    if not copied and (group.get("fused") or group.get("foreach") is False):
        yield group
        return
    found: dict[int | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        found.setdefault(numbers.get(id(parameter)), []).append(parameter)
    for parameters in found.values():
        yield {**group, "params": parameters}
