"""Follows parameters that a model changes in place, out of autograd's sight, while it is traced.

Coefficients are clamped, prototypes normalised, and the weights of a teacher follow those of a
student. A write becomes a new value: what is called later gets it in place of the parameter, and
its gradient is that of the parameter. After the call it is an update of the graph, like those of
buffers.

Importing this file registers the operator `replaced`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn


@torch.library.custom_op("shardwright::replaced", mutates_args=())
def replaced(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy of `value`, whose gradient is that of `parameter`."""
    return value.clone()


@replaced.register_fake
def _(parameter: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


replaced.register_autograd(_backward)


@final
class ParameterUpdates:
    """The values of the parameters of `model` that were written to since its call began."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._now: dict[str, Tensor] = {}  # what operators read, by the parameter's first name
        # Names of parameters and their aliases, by identity.
        self._names = {id(tensor): name for name, tensor in self._parameters.items()}
        self._aliases: dict[int, Tensor] = {}  # of `.data` and `detach`; kept for their identities
        self._views: dict[int, tuple[Tensor, str, int]] = {}  # with the name, and writes before
        self._writes = 0
        self.values: dict[str, Tensor] = {}  # without gradient

    def note_alias(self, alias: Tensor, name: str) -> None:
        """Record that `alias` shares memory with a parameter, without a gradient."""
        self._aliases[id(alias)] = alias
        self._names[id(alias)] = name

    def note_views(self, of: Tensor, views: Any) -> None:
        """Record that `views` may share memory with `of`, if that is a parameter or shares it."""
        name = self._names.get(id(of)) or self._views.get(id(of), ("", "", 0))[1]
        for view in views if isinstance(views, tuple | list) else (views,):
            if name and isinstance(view, Tensor) and id(view) not in self._names:
                self._views[id(view)] = (view, name, self._writes)

    def stale(self, value: Any) -> str:
        """The name of a written parameter of which an argument is an older view; empty if none."""
        if isinstance(value, tuple | list):
            return next((name for one in value if (name := self.stale(one))), "")
        _, name, writes = self._views.get(id(value), (None, "", 0))
        return name if name in self.values and writes < self._writes else ""

    def viewed(self, value: Any) -> str:
        """The parameter of which `value` is a view; empty if it is none."""
        if isinstance(value, tuple | list):  # of what a function writes to several of
            return next((name for one in value if (name := self.viewed(one))), "")
        return self._views.get(id(value), (None, self._names.get(id(value), ""), 0))[1]

    def write(
        self, name: str, function: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `function`, which writes to `target`, a parameter or an alias of it."""
        parameter = self._parameters[name]
        with torch.no_grad():
            value = self._now.get(name, parameter).detach().clone()
            result = function(value, *args, **kwargs)
        self.values[name] = self._now[name] = value
        self._writes += 1
        if parameter.requires_grad:
            with torch.enable_grad():
                self._now[name] = replaced(parameter, value)
        return None if result is None else target

    def current(self, value: Any) -> Any:
        """An argument with the new values of parameters, and of their aliases."""
        if isinstance(value, Tensor):
            now = self._now.get(self._names.get(id(value), ""))
            if now is None:
                return value
            return now.detach() if id(value) in self._aliases else now
        if type(value) in (tuple, list):
            return type(value)(map(self.current, value))
        if type(value) is dict:
            return {key: self.current(one) for key, one in value.items()}
        return value
