"""Records the Python state of a model, i.e. the state that is not in parameters and buffers.

It consists of other attributes of modules and their classes, of globals and closure values that
`forward` reads, of the identities of parameters and sub-modules, and of the states of Python's and
NumPy's random generators. A graph contains such values, and numbers drawn from these generators, as
constants. A `Snapshot` records the state before a call, finds what a call changed, and restores it
with the exceptions that `Snapshot.restore` names.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.tracing.torch_private import version_of

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MODULES_OWN = frozenset(("_parameters", "_buffers", "_modules", "forward"))
_MOST_ITEMS = 20_000  # items of one container; of longer ones only the length is compared
_MOST_DEPTH = 6

_FOREIGN = ("torch", "logging", "threading", "_thread", "weakref", "concurrent", "asyncio")

_PARAMETER, _MODULE = " (a parameter)", " (a module)"

Leaf = tuple[Any, ...]  # equal for an unchanged value


class StateLocation(NamedTuple):
    """The location of a value: attribute `name` of the module at `path`, a class or a function."""

    path: str
    name: str

    @property
    def is_identity(self) -> bool:
        """Whether the value is which parameter or sub-module a name stands for."""
        return self.name.endswith((_PARAMETER, _MODULE))

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


@final
class Snapshot:
    """Python state at one time: for each location the leaves of its value, by their paths in it."""

    def __init__(self, model: nn.Module, only: StateLocation | None = None) -> None:
        self._seen: dict[int, Any] = {}  # visited objects, by id; kept so that ids stay unique
        self.leaves: dict[StateLocation, dict[str, Leaf]] = {}
        self.tensors: dict[int, tuple[StateLocation, Tensor]] = {}  # by identity
        self._holders: list[tuple[Any, Any]] = []  # containers and their content
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for location, value in state_locations(model):
            if only is not None and location != only:
                continue
            found: dict[str, Leaf] = {}
            self._visit(location, "", value, found, 0)
            self.leaves[location] = found
        for module in model.modules() if only is None else ():
            own = {k: v for k, v in vars(module).items() if k not in _MODULES_OWN}
            self._attributes.append((vars(module), own))
            self._keep(module._parameters)
            self._keep(module._modules)

    @classmethod
    def of(cls, model: nn.Module, location: StateLocation) -> dict[StateLocation, dict[str, Leaf]]:
        """Leaves of the value at one location."""
        return cls(model, location).leaves

    def changes(self, later: Snapshot) -> list[StateLocation]:
        """Locations whose values differ in `later`."""
        every = dict.fromkeys((*self.leaves, *later.leaves))
        return [p for p in every if self.leaves.get(p) != later.leaves.get(p)]

    def plain_changes(self, later: Snapshot) -> list[StateLocation]:
        """Locations with a difference in `later` that is not only one tensor instead of another."""
        return [
            p
            for p in self.changes(later)
            if _plain(self.leaves.get(p, {})) != _plain(later.leaves.get(p, {}))
        ]

    def differs_in_tensors(self, later: Snapshot) -> bool:
        """Whether a tensor, a parameter or a module of `later` is another one."""
        for location in self.changes(later):
            mine, theirs = self.leaves.get(location, {}), later.leaves.get(location, {})
            changed = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]
            leaves = [leaf for k in changed for leaf in (mine.get(k), theirs.get(k)) if leaf]
            if location.is_identity or any(leaf[0] is Tensor for leaf in leaves):
                return True
        return False

    def became_text(self, later: Snapshot) -> frozenset[StateLocation]:
        """Locations whose only changes are from None to a text, e.g. a mode that is chosen once."""
        found = []
        for location in self.changes(later):
            mine, theirs = self.leaves.get(location, {}), later.leaves.get(location, {})
            changed = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]
            if all(mine.get(k) == (type(None), "None") and theirs[k][0] is str for k in changed):
                found.append(location)
        return frozenset(found)

    def restore(self) -> None:
        """Restore the attributes of modules, and the items of containers and objects.

        Not restored are containers of more than `_MOST_ITEMS` items, the elements of arrays, random
        generators, and class attributes, globals and closure values that refer to other objects.
        """
        for attributes, own in self._attributes:
            for name in [k for k in attributes if k not in own and k not in _MODULES_OWN]:
                del attributes[name]
            attributes.update(own)
        for holder, content in self._holders:
            if isinstance(holder, dict):
                same = len(holder) == len(content) and all(
                    a is b and holder[a] is content[b] for a, b in zip(holder, content, strict=True)
                )
                if not same:
                    holder.clear()
                    holder.update(content)
            elif isinstance(holder, list):
                holder[:] = content
            elif isinstance(holder, deque):
                holder.clear()
                holder.extend(content)
            elif isinstance(holder, set):
                holder.clear()
                holder.update(content)

    def _visit(
        self, location: StateLocation, path: str, value: Any, found: dict[str, Leaf], depth: int
    ) -> None:
        """Note a value and, if it is a container, its parts, by path."""
        if isinstance(value, Tensor):
            version = 0 if value.is_inference() else version_of(value)
            found[path] = (Tensor, id(value), version)
            self.tensors[id(value)] = (location, value)
            return
        if value is None or isinstance(value, _PLAIN):
            found[path] = (type(value), repr(value))
            return
        if isinstance(value, np.ndarray):
            found[path] = (np.ndarray, value.shape, str(value.dtype), value.tobytes())
            return
        if isinstance(value, _GENERATORS):
            found[path] = (type(value), _state_of(value))
            return
        if isinstance(value, (nn.Module, *_CODE)):
            return
        found[path] = (type(value),)
        if id(value) in self._seen or depth > _MOST_DEPTH:
            return
        self._seen[id(value)] = value
        for key, part in self._parts(value, found, path):
            self._visit(location, f"{path}{key}", part, found, depth + 1)

    def _parts(self, value: Any, found: dict[str, Leaf], path: str) -> Iterator[tuple[str, Any]]:
        """The parts of a container with their paths; notes its type and length."""
        if isinstance(value, Mapping):
            self._keep(value)
            found[path] = (type(value), len(value))
            if len(value) <= _MOST_ITEMS:
                for key, part in list(value.items()):
                    yield f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{id(key)}]", part
        elif isinstance(value, list | tuple | deque):
            self._keep(value)
            found[path] = (type(value), len(value))
            if len(value) <= _MOST_ITEMS:
                for i, part in enumerate(list(value)):
                    yield f"[{i}]", part
        elif isinstance(value, set | frozenset):
            self._keep(value)
            found[path] = (type(value), sorted(map(repr, value)))
        elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _FOREIGN:
            self._keep(vars(value))
            for key, part in list(vars(value).items()):
                yield f".{key}", part

    def _keep(self, value: Any) -> None:
        if len(value) <= _MOST_ITEMS:
            content = dict(value) if isinstance(value, dict) else list(value)
            self._holders.append((value, content))


def state_locations(model: nn.Module) -> Iterator[tuple[StateLocation, Any]]:
    """The locations at which a call may keep Python state, with their present values."""
    yield StateLocation("", "the generator of Python's random"), repr(random.getstate())
    yield (
        StateLocation("", "the generator of numpy.random"),
        _text(np.random.get_state(legacy=False)),
    )
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        classes.update(dict.fromkeys(type(module).__mro__))
        for name, value in vars(module).items():
            if name not in _MODULES_OWN:
                yield StateLocation(path, name), value
            if isinstance(value, FunctionType) and _is_users(value.__module__ or ""):
                yield from of_function(value)
        for name, child in module._modules.items():
            yield StateLocation(path, f"{name}{_MODULE}"), (id(child),)
        for name, parameter in module._parameters.items():
            yield StateLocation(path, f"{name}{_PARAMETER}"), (id(parameter),)
    for cls in classes:
        if _is_users(cls.__module__):
            yield from _of_class(cls)


def _of_class(cls: type) -> Iterator[tuple[StateLocation, Any]]:
    """Plain attributes of a class, and plain globals and closure values of its `forward`."""
    for name, value in vars(cls).items():
        if not name.startswith("__") and _is_data(value):
            yield StateLocation("", f"{cls.__qualname__}.{name}"), value
    forward = vars(cls).get("forward")
    if isinstance(forward, FunctionType):
        yield from of_function(forward)


def of_function(function: FunctionType) -> Iterator[tuple[StateLocation, Any]]:
    """Plain values that a function reads from its globals and closure."""
    code = function.__code__
    for name in code.co_names:
        value = function.__globals__.get(name)
        if _is_data(value):
            yield StateLocation("", f"{name} (a global)"), value
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if _is_data(value):
            yield StateLocation("", f"{name} (a closure)"), value


def _is_data(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, *_GENERATORS, list, dict, set, deque))


def _state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return _text(generator.get_state(legacy=False))
    return _text(generator.bit_generator.state)


def _text(state: Any) -> str:
    """The state of a NumPy generator, whole: `repr` would shorten its arrays."""
    if isinstance(state, Mapping):
        return str({key: _text(value) for key, value in state.items()})
    return state.tobytes().hex() if isinstance(state, np.ndarray) else repr(state)


def _is_users(module: str) -> bool:
    return not module.startswith(
        ("torch.", "torch", "transformers", "builtins", "abc", "typing", "shardwright")
    )


def _plain(leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Leaves without the identities and versions of tensors."""
    return {path: leaf[:1] if leaf[0] is Tensor else leaf for path, leaf in leaves.items()}
