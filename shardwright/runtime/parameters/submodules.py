"""The sub-modules of a parallel module: they hold its tensors, and the planned program computes.

A loop over `modules()` finds them as instances of the model's classes, as scripts expect that leave
norms out of weight decay or keep them in evaluation. What the program would ignore is refused: a
hook, another child or parameter, another value of an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import nn

from shardwright.ir.plan import PlanError

_OWN = frozenset(vars(nn.Module()))  # attributes of every module
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class _Unread:
    """Stands for a value that cannot be compared; a class, of which copies are itself."""


class SubModule(nn.Module):
    """Stands for a sub-module of the model, of which it has tensors, mode and plain attributes.

    `isinstance` finds it to be of the model's class.
    """

    _sw_kind: type[nn.Module] = nn.Module
    _sw_name = ""
    _sw_given: Mapping[str, Any] = {}

    @property  # type: ignore[override]
    def __class__(self) -> type[nn.Module]:
        """The class of the sub-module that it stands for."""
        return self._sw_kind

    @__class__.setter
    def __class__(self, kind: type[nn.Module]) -> None:
        # `torch.nn.utils.parametrize` sets a class of its own, through which tensors are read.
        vars(object)["__class__"].__set__(self, kind)

    def stand_for(self, name: str, theirs: nn.Module) -> None:
        """Take over class, name and plain attributes of `theirs`; from now on refuse changes."""
        for key, parameter in theirs._parameters.items():
            if parameter is None and key not in self._parameters:
                self.register_parameter(key, None)
        self.__dict__.update(
            _sw_kind=type(theirs), _sw_name=name, _sw_given=plain_attributes(theirs)
        )
        if isinstance(theirs, _CONTAINERS):
            vars(object)["__class__"].__set__(self, SubModules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `PlanError`: it does not compute."""
        raise PlanError(
            f"{self._sw_where()} cannot be called: under a plan the model is computed as a whole;"
            " call the parallel module, with outputs='model' for all that the model returns"
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of `nn.Module`, as long as it stands for nothing; then raise `PlanError`."""
        self._sw_refuse_new(name, "parameter")
        super().register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As of `nn.Module`, as long as it stands for nothing; then raise `PlanError`."""
        self._sw_refuse_new(name, "module")
        super().add_module(name, module)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `PlanError`: the program would not run the hook."""
        raise PlanError(f"a hook on {self._sw_where()} would not run; {_EARLIER}")

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook
    register_backward_hook = register_forward_hook

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("_sw_given", {})
        if given.get(name, _Unread) is not _Unread:
            return given[name]
        if name in given:
            raise AttributeError(
                f"{self._sw_where()} has no {name} under a plan; read that of the model itself"
            )
        found = None if name.startswith("__") else getattr(self._sw_kind, name, None)
        if isinstance(found, FunctionType):  # such as `reset_running_stats`, with these tensors
            return MethodType(found, self)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sw_name:
            if isinstance(value, nn.Parameter):
                self._sw_refuse_new(name, "parameter")
            elif isinstance(value, nn.Module):
                self._sw_refuse_new(name, "module")
            elif name == "forward":
                raise PlanError(f"another forward of {self._sw_where()} would not run; {_EARLIER}")
            refuse_other(self._sw_given, name, value, f"{self._sw_where()}: ")
        super().__setattr__(name, value)

    def _sw_refuse_new(self, name: str, what: str) -> None:
        if self._sw_name:
            raise PlanError(
                f"{self._sw_where()} takes no other {what} {name}: the plan computes with those of"
                f" the model; write into a parameter under torch.no_grad(), or {_EARLIER}"
            )

    def _sw_where(self) -> str:
        return f"{self._sw_name} ({self._sw_kind.__name__})"


@final
class SubModules(SubModule):
    """Stands for a container, such as `nn.ModuleList`, whose items are found as in the model's."""

    _sw_kind: Any

    def __len__(self) -> int:
        return int(self._sw_kind.__len__(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sw_kind.__iter__(self))

    def __getitem__(self, key: Any) -> Any:
        return self._sw_kind.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self._sw_kind.__iter__(self)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList)
_EARLIER = "change the model before sw.parallelize"


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module` beside tensors and children, with their values if plain."""
    kept = _OWN | {*module._parameters, *module._buffers, *module._modules}
    return {
        name: value if _is_plain(value) else _Unread
        for name, value in vars(module).items()
        if name not in kept
    }


def refuse_other(given: Mapping[str, Any], name: str, value: Any, where: str = "") -> None:
    """Raise `PlanError` if the model has an attribute `name`, and not this value of it."""
    if name not in given:
        return
    planned = given[name]
    if planned is not _Unread and type(planned) is type(value) and planned == value:
        return
    was = "another value" if planned is _Unread else repr(planned)
    raise PlanError(
        f"{where}{name} was {was} when the plan was made, and a change of it would be ignored; keep"
        " what changes in a buffer or pass it to forward, or plan anew"
    )


def mirror(owner: nn.Module, model: nn.Module) -> None:
    """Give `owner` a sub-module for each of `model`."""
    for name, theirs in model.named_modules(remove_duplicate=False):
        ours, _ = container(owner, f"{name}." if name else "")
        if name and type(ours) is SubModule:
            ours.stand_for(name, theirs)
    for name, theirs in model.named_modules(remove_duplicate=False):
        children = container(owner, f"{name}." if name else "")[0]._modules
        for key in theirs._modules:  # in the model's order
            if key in children:
                children[key] = children.pop(key)


def container(root: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor `key`, made on the way, and the tensor's name in it."""
    *path, name = key.split(".")
    module = root
    for part in path:
        found = module._modules.get(part)
        if found is None:
            # Not by `add_module`, which refuses names of methods, as a child called `graph`.
            found = module._modules[part] = SubModule()
        module = found
    return module, name


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))
