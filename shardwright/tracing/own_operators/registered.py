"""Looks up operators by name, also those that a library registers when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_LIBRARIES = {"transformers": "transformers.integrations.moe"}  # by namespace of operators


def registered(target: str) -> Callable[..., Any]:
    """The torch operator `namespace.name.overload`.

    A process that runs a graph need not have imported the model's library, which is done here.

    >>> registered("aten.mm.default")
    <OpOverload(op='aten.mm', overload='default')>
    """
    namespace, name, overload = target.split(".")
    operators = getattr(torch.ops, namespace)
    if namespace in _LIBRARIES and not hasattr(operators, name):
        import_module(_LIBRARIES[namespace])
    found: Callable[..., Any] = getattr(getattr(operators, name), overload)
    return found
