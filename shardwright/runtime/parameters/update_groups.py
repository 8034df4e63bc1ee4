"""Updates parameters in groups, and as plain tensors: what `param_groups` are during a step.

An optimizer of `torch.optim` with `foreach` makes temporaries of all parameters of one of its
`param_groups` at a time. During a step these are replaced by smaller ones with the same
hyperparameters. The update of an element depends on nothing else, so the numbers are the same, and
so are those of this rank's tiles: a group has them in place of DTensors, of which every operator
takes many times as long to dispatch, and which torch updates one after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.ir.options.optimizers import SEPARATE
from shardwright.ir.plan import PlanError
from shardwright.program.step.step_program import UpdateParts
from shardwright.runtime.parameters.dtensor_spec import local, placed_like
from shardwright.runtime.parameters.host_state import HostState

_SEPARATE = frozenset(getattr(torch.optim, name) for name in SEPARATE)
_parts: WeakKeyDictionary[nn.Module, UpdateParts] = WeakKeyDictionary()
_whole: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()  # during a step


def update_in_groups(module: nn.Module, parts: UpdateParts) -> None:
    """From now on update the parameters of `module` group by group, with the state where it is."""
    _parts[module] = parts


class StepGroups(list[dict[str, Any]]):
    """Groups of parameters for one step, whose DTensors are this rank's tiles while it has them.

    State of parameters in `streamed` is on the device meanwhile, and on the host otherwise.
    """

    def __init__(
        self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], streamed: Collection[int]
    ) -> None:
        super().__init__(groups)
        copies = HostState(optimizer, streamed, state_on_host() - streamed_parameters())
        self._optimizer, self._copies = optimizer, copies

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each group while its tiles may be updated."""
        for group in self._copies.through([*super().__iter__()]):
            tiles = [self._tile(parameter) for parameter in group["params"]]
            try:
                yield {**group, "params": tiles}
            finally:
                for parameter, tile in zip(group["params"], tiles, strict=True):
                    self._take_state(parameter, tile)
        join_groups(self._optimizer)  # before other hooks read them

    def _tile(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tile of a parameter with the tiles of gradient and state, if all lie as it does."""
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not parameter.dim():
            return parameter
        state = self._optimizer.state.get(parameter, {})
        values = [v for v in (gradient, *state.values()) if isinstance(v, DTensor)]
        plain = gradient is not None and not isinstance(gradient, DTensor)
        if plain or any(value.placements != parameter.placements for value in values):
            return parameter
        tile = local(parameter).detach()
        tile.grad = None if gradient is None else local(gradient).detach()
        if state:
            tiles = {k: local(v) if isinstance(v, DTensor) else v for k, v in state.items()}
            self._optimizer.state[tile] = tiles
        return tile

    def _take_state(self, parameter: torch.Tensor, tile: torch.Tensor) -> None:
        """Make the state of a tile that of its parameter."""
        if tile is parameter or tile not in self._optimizer.state:
            return
        found, state = self._optimizer.state.pop(tile), self._optimizer.state[parameter]
        for key, value in found.items():
            known = state.get(key)
            if isinstance(known, DTensor) and local(known) is value:
                continue
            whole = isinstance(value, torch.Tensor) and value.dim() and value.shape == tile.shape
            state[key] = placed_like(value, parameter.detach()) if whole else value


def streamed_parameters() -> frozenset[int]:
    """The parameters, by id, whose state is copied from the host for their update."""
    return _where(lambda parts: parts.on_host)


def state_on_host() -> frozenset[int]:
    """The parameters, by id, whose state is kept on the host: those, and all that are there."""
    return _where(lambda parts: parts.on_host or parts.by_host)


def _where(wanted: Callable[[UpdateParts], bool]) -> frozenset[int]:
    return frozenset(
        identity
        for one, parts in _parts.items()
        if wanted(parts)
        for identity in _numbers(one, parts)
    )


def _numbers(module: nn.Module, parts: UpdateParts) -> dict[int, int]:
    """The number of the group of each parameter, by id; scripts may have replaced some."""
    known = dict(module.named_parameters(remove_duplicate=False))
    return {
        id(known[name]): number
        for number, names in enumerate(parts.groups)
        for name in names
        if name in known
    }


def split_groups(optimizer: Optimizer) -> None:
    """Split the optimizer's `param_groups` for a step; `join_groups` ends it.

    An optimizer of a class whose updates may depend on each other is left as it is, with a warning.
    """
    if not _parts:
        return
    if torch.compiler.is_compiling():
        if state_on_host():
            raise PlanError(
                "a compiled step of the optimizer does not copy its state from the host; call step"
                " without torch.compile, or take offload out of the plan"
            )
        return
    numbers: dict[int, int] = {}
    for module, parts in _parts.items():
        numbers |= _numbers(module, parts)
    given, streamed = optimizer.param_groups, streamed_parameters()
    mine = {id(one) for group in given for one in group["params"]}
    if mine.isdisjoint(numbers):
        return
    if not state_on_host().isdisjoint(mine):
        _require_separate(optimizer)
    found = [part for group in given for part in _parts_of(group, numbers, streamed)]
    if type(optimizer) not in _SEPARATE:
        if len(found) > len(given):
            warnings.warn(
                f"{type(optimizer).__name__} updates all parameters at once, and the plan does it"
                " in groups; it may need more memory than predicted",
                stacklevel=2,
            )
        return
    _whole[optimizer] = given
    optimizer.param_groups = StepGroups(optimizer, found, streamed)


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
            " offload out of the plan"
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
