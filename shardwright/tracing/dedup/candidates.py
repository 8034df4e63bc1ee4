"""Proposes repeated modules by class and parameter shapes; their traced calls confirm it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_LEAST = 4  # modules in a block; smaller ones are traced as fast as they are compared


@dataclass(frozen=True)
class Blocks:
    """The outermost modules of a model that may repeat.

    `paths` maps the path of each to a key, which is equal for modules with equal attributes.
    `names` maps the identity of each module inside of a block to its path within the block.
    """

    paths: Mapping[str, Any]
    names: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module) -> Blocks:
        """The blocks of a model.

        There are none if a module has two paths, of which tracing uses only one, if a parameter
        or buffer is not on the meta device, or if a module's `forward` is replaced on the instance.
        """
        every = list(model.named_modules(remove_duplicate=False))
        tensors = [*model.parameters(), *model.buffers()]
        if (
            len({id(module) for _, module in every}) < len(every)
            or not all(t.is_meta for t in tensors)  # a rehearsal replaces them by meta tensors
            or any("forward" in vars(module) for _, module in every)  # e.g. opaque modules
        ):
            return cls({}, {})
        looks: dict[str, int] = {}  # path -> number, equal for equal attributes
        sizes: dict[str, int] = {}  # path -> number of modules
        seen: dict[Any, int] = {}
        for path, module in reversed(every):
            inside = [f"{path}.{name}".lstrip(".") for name, _ in module.named_children()]
            sizes[path] = 1 + sum(sizes[p] for p in inside)
            look = _look(module), tuple(looks[p] for p in inside)
            looks[path] = seen.setdefault(look, len(seen))
        counts = Counter(looks.values())
        paths: dict[str, Any] = {}
        names: dict[int, str] = {}
        for path, module in every:
            outer = next((p for p in _above(path) if p in paths), None)
            if outer is not None:
                names[id(module)] = path.removeprefix(f"{outer}.")
            elif path and sizes[path] >= _LEAST and counts[looks[path]] > 1:
                paths[path] = looks[path]
        return cls(paths, names)


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _look(module: nn.Module) -> Any:
    """The attributes of a module by which modules are compared.

    Class, names of children, parameters, buffers, and attributes that are None, booleans, texts or
    floats. Integers are left out, because they are often just counters.
    """
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    settings = [
        (name, value)
        for name, value in vars(module).items()
        if value is None or isinstance(value, bool | str | float)
    ]
    children = tuple(name for name, _ in module.named_children())
    return type(module), children, tuple(settings), tuple((name, _form(t)) for name, t in own)


def _form(t: Tensor) -> Any:
    return type(t), tuple(t.shape), t.dtype, t.requires_grad
