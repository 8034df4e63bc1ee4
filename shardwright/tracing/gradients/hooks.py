"""Finds hooks that a call of a model runs and a captured graph would not.

Forward hooks of modules run while the model is traced, so the graph contains their operators. A
backward hook of a module runs in the backward pass: a module that has one is kept whole, or
rejected. Hooks on parameters and hooks on all modules are rejected.

torch has no public list of hooks: its private names are used in this file only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.tracing.call import CaptureError

_OF_MODULES = {
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
_OF_A_CALL = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = {
    "_backward_hooks": "a hook on its gradient",
    "_post_accumulate_grad_hooks": "a hook after its gradient is accumulated",
}
_OF_ALL_MODULES = {
    "_global_backward_hooks": "a backward hook",
    "_global_backward_pre_hooks": "a backward pre-hook",
    "_global_forward_hooks": "a forward hook",
    "_global_forward_pre_hooks": "a forward pre-hook",
}


def refuse_hooks(model: nn.Module) -> None:
    """Raise `CaptureError` for hooks on parameters, and for hooks on all modules."""
    for kind, what in _OF_ALL_MODULES.items():
        for hook in _found(torch.nn.modules.module, kind):
            raise CaptureError(
                f"{where(hook)}: {what} is registered for all modules, and would run on those of a"
                " plan too; remove it, and register hooks on the modules that need them",
                refused=True,
            )
    for name, parameter in model.named_parameters():
        for kind, what in _OF_PARAMETERS.items():
            for hook in _found(parameter, kind):
                raise CaptureError(
                    f"{where(hook)}: {name} has {what}, which a plan does not run; remove it, and"
                    " change gradients between backward() and the optimizer's step",
                    refused=True,
                )


def refuse_backward_hooks(model: nn.Module, whole: Collection[str] = ()) -> None:
    """Raise `CaptureError` for a module with a backward hook, naming it as one to keep whole.

    `whole` are the paths of modules that are kept whole, with the backward hooks of all modules
    inside.
    """
    for path, module in model.named_modules():
        if any(path == p or path.startswith(f"{p}.") for p in whole):
            continue
        for kind, what in _OF_MODULES.items():
            for hook in _found(module, kind):
                raise CaptureError(
                    f"{where(hook)}: {path or 'the model'} ({type(module).__name__}) has {what},"
                    " which may change gradients and is no part of a graph; remove it, or register"
                    " it on a module inside, which is then kept whole",
                    path,
                )


Hooks = dict[str, dict[int, Any]]


@contextmanager
def hooks_removed(module: nn.Module) -> Iterator[Hooks]:
    """A context in which a call of `module` runs none of its own hooks; yields those hooks."""
    hooks = {name: dict(vars(module)[name]) for name in _OF_A_CALL}
    with with_hooks(module, {}):
        yield hooks


@contextmanager
def with_hooks(module: nn.Module, hooks: Hooks) -> Iterator[None]:
    """A context in which `module` has these hooks only."""
    before = {name: dict(vars(module)[name]) for name in _OF_A_CALL}
    try:
        _put(module, hooks)
        yield
    finally:
        _put(module, before)


def _put(module: nn.Module, hooks: Hooks) -> None:
    for name in _OF_A_CALL:
        registry = vars(module)[name]
        registry.clear()
        registry.update(hooks.get(name, {}))


def where(function: Callable[..., Any]) -> str:
    """File and line of a function's code; its name where it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    code = inspect.unwrap(function)
    if not (inspect.isfunction(code) or inspect.ismethod(code)) and callable(code):
        code = type(code).__call__
    try:
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return getattr(function, "__qualname__", type(function).__name__)


def _found(owner: Any, kind: str) -> list[Callable[..., Any]]:
    hooks: Mapping[int, Callable[..., Any]] | None = getattr(owner, kind, None)
    return list((hooks or {}).values())
