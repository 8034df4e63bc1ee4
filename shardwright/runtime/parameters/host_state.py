"""Keeps parameters, or an optimizer's state alone, in the memory of the host.

Between two steps the state of parameters is on the host. During a step the optimizer goes through
groups of them (`update_groups.py`): while one is updated, the state of the next one is copied from
the host, and that of the one before it back. The update is that of the device, so numbers are equal
to those of state that stays there. Parameters that are on the host themselves are updated there,
with their state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.runtime.executor.host_memory import HostCopyInFlight, copy_streams, mapped
from shardwright.runtime.parameters.dtensor_spec import local, placed_like

_homes: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # on the host, by id


class _Copy(NamedTuple):
    """A tensor of a parameter's state in flight."""

    parameter: torch.Tensor
    key: str
    made: torch.Tensor
    flight: HostCopyInFlight


@final
class HostState:
    """Copies the state of an optimizer's parameters, those in `streamed`, from the host and back.

    The state of parameters in `hosted`, which are on the host, is moved to its memory once. That of
    others stays where it is.
    """

    def __init__(
        self, optimizer: Optimizer, streamed: Collection[int], hosted: Collection[int]
    ) -> None:
        self._optimizer, self._streamed = optimizer, streamed
        self._kept = frozenset((*streamed, *hosted))
        self._left: dict[tuple[int, str], torch.Tensor] = {}  # homes of state on the device

    def through(self, groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Each group while its state is on the device; afterwards all state is on the host."""
        arriving = self._fetched(groups[0]) if groups else []
        leaving: list[list[_Copy]] = []
        for at, group in enumerate(groups):
            self._arrive(arriving)
            while len(leaving) > 1:  # that of the group before may still leave
                _end(leaving.pop(0))
            arriving = self._fetched(groups[at + 1]) if at + 1 < len(groups) else []
            yield group
            leaving.append(self._offloaded(group))
        for copies in leaving:
            _end(copies)

    def _fetched(self, group: dict[str, Any]) -> list[_Copy]:
        """Start to copy the state of a group to the device."""
        found = []
        for parameter, key, value in self._state(group, self._streamed):
            if not is_home(value):
                continue  # of a first step, or loaded since
            tile = local(value)
            made, stream = (
                torch.empty_like(tile, device=parameter.device),
                copy_streams(parameter.device)[1],
            )
            flight = HostCopyInFlight(tile, made, stream)
            found.append(_Copy(parameter, key, placed_like(made, value), flight))
            self._left[id(parameter), key] = value
        return found

    def _arrive(self, copies: Sequence[_Copy]) -> None:
        for parameter, key, made, flight in copies:
            flight.results()
            self._optimizer.state[parameter][key] = made

    def _offloaded(self, group: dict[str, Any]) -> list[_Copy]:
        """Start to copy the state of a group to the host, where it is from now on."""
        found = []
        for parameter, key, value in self._state(group, self._kept):
            if is_home(value):
                continue  # updated there
            home = self._left.pop((id(parameter), key), None)
            if home is None or home.shape != value.shape or home.dtype != value.dtype:
                home = home_like(value)
            flight = HostCopyInFlight(local(value), local(home), copy_streams(value.device)[0])
            self._optimizer.state[parameter][key] = home
            found.append(_Copy(parameter, key, home, flight))
        return found

    def _state(
        self, group: dict[str, Any], whose: Collection[int]
    ) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """The tensors of the state of some of the group's parameters: (parameter, key, value)."""
        return [
            (parameter, key, value)
            for parameter in group["params"]
            if id(parameter) in whose
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if is_streamed(value)
        ]


def load_on_host(
    optimizer: Optimizer,
    load: Callable[[Optimizer, dict[str, Any]], None],
    given: dict[str, Any],
    kept: Collection[int],
) -> None:
    """Load a state dict, the state of the parameters in `kept` directly into the host's memory.

    `load` is that of torch, which would have all state on the device at once. Tensors lie as the
    parameters do, and get their dtype.
    """
    saved = chain.from_iterable(group["params"] for group in given["param_groups"])
    mine = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state, streams = dict(given["state"]), list[tuple[torch.Tensor, dict[str, torch.Tensor]]]()
    for number, parameter in zip(saved, mine, strict=False):  # torch tells of other numbers
        if number in state and id(parameter) in kept:
            found = {k: v for k, v in state[number].items() if is_streamed(v)}
            state[number] = {k: v for k, v in state[number].items() if k not in found}
            streams.append((parameter, found))
    load(optimizer, {**given, "state": state})
    for parameter, found in streams:
        for key, value in found.items():
            home = home_like(parameter.detach() if value.shape == parameter.shape else value)
            local(home).copy_(local(value))
            optimizer.state[parameter][key] = home


def is_streamed(value: object) -> bool:
    """Whether a value of a parameter's state goes to the host; counts of steps do not."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def is_home(value: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or state on the host, made by one of these functions."""
    return _homes.get(id(value)) is value


def on_host(given: nn.Parameter) -> nn.Parameter:
    """The same parameter in the memory of the host."""
    home = home_like(given.detach())
    local(home).copy_(local(given.detach()))
    found = nn.Parameter(home, requires_grad=given.requires_grad)
    _homes[id(found)] = found
    return found


def home_like(value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor on the host for state like `value`, in its layout on the mesh."""
    dtype = value.dtype if dtype is None else dtype
    if value.device.type == "cpu":  # outside of what torch's allocator has, which is the device's
        shape = local(value).shape
        made = mapped(shape.numel() * dtype.itemsize).view(dtype).view(shape)
        home = placed_like(made, value)
    else:
        home = torch.empty_like(value, dtype=dtype, device="cpu", pin_memory=True)
    _homes[id(home)] = home
    return home


def _end(copies: Sequence[_Copy]) -> None:
    for copy in copies:
        copy.flight.results()
