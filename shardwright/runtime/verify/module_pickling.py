"""Pickles opaque modules and autograd functions for the processes that `verify` starts.

A class is sent by name, as pickle does it. Where the other process cannot
import it, because it lives in a script, that script is loaded as a module, as
`multiprocessing` does with the main one.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from shardwright.ir.plan import PlanError
from shardwright.tracing.export.opaque import OpaqueCall
from shardwright.tracing.gradients.autograd_functions import FunctionCall


def pack(calls: Mapping[str, OpaqueCall | FunctionCall]) -> bytes:
    """Everything to run `calls` but the weights; raises `PlanError` for what cannot be sent."""
    names = {one.__module__ for call in calls.values() for one in call.classes()}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    try:
        return pickle.dumps((files, pickle.dumps(dict(calls))))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as e:
        paths = ", ".join(sorted(call.path for call in calls.values()))
        raise PlanError(
            f"verify runs the plan in processes of its own, where {paths} cannot be sent ({e});"
            " define its class at the top level of a file, and keep nothing in it that is of this"
            " process alone"
        ) from e


def unpack(packed: bytes) -> dict[str, OpaqueCall | FunctionCall]:
    """The calls that `pack` packed, in a process of the same user on the same machine."""
    files, calls = pickle.loads(packed)
    found: dict[str, OpaqueCall | FunctionCall] = _Reader(io.BytesIO(calls), files).load()
    return found


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, files: Mapping[str, str | None]) -> None:
        super().__init__(stream)
        self.files = files

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            found = _loaded(module, self.files.get(module))
            for part in name.split("."):
                found = getattr(found, part)
            return found


def _loaded(name: str, file: str | None) -> Any:
    name = "__mp_main__" if name == "__main__" else name  # so that it does not run as a program
    if name in sys.modules or file is None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
