"""Corrects three behaviours of PyTorch's optimizers with sharded parameters, and checks theirs.

* `torch.optim.Adafactor` squares partial norms in place, which DTensor refuses (seen with torch
  2.13; it also fails for FSDP parameters). During its step, norms are reduced as soon as they are
  computed.
* `torch.optim.Muon` orthogonalises whole matrices in bfloat16; DTensor would multiply tiles and add
  up rounded sums. During its step, a matrix is gathered when it is cast to bfloat16.
* `Optimizer.load_state_dict` accepts tiles that `torch.load` read from another rank's file as this
  rank's own. It is wrapped for the whole process, because no hook covers every optimizer before it
  loads: such a tile is refused, and a whole tensor is cut.
* An optimizer of the parameters of the model, and not of the parallel module, would train nothing:
  its step is an error, and so is a step of a module with an optimizer of other parameters.

Steps go through the groups of parameters of a plan, too (`update_groups.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardwright.ir.plan import PlanError
from shardwright.runtime.parameters.host_state import load_on_host
from shardwright.runtime.parameters.state_dicts import as_placed
from shardwright.runtime.parameters.update_groups import (
    join_groups,
    split_groups,
    state_on_host,
)

_NORMS = (torch.norm, torch.linalg.vector_norm, torch.Tensor.norm)
_registered: list[Any] = []
_splits: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
_given: WeakSet[nn.Module] = WeakSet()  # models that were given to `parallelize`


def mend_optimizers() -> None:
    """Apply all three corrections in this process; a second call does nothing."""
    if _registered:
        return
    _registered.append(register_optimizer_step_pre_hook(_before))
    _registered.append(register_optimizer_step_post_hook(_after))
    load = Optimizer.load_state_dict

    @wraps(load)
    def load_placed(self: Optimizer, state_dict: Mapping[str, Any]) -> None:
        load_on_host(self, load, placed_here(self, state_dict), state_on_host())

    Optimizer.load_state_dict = load_placed  # type: ignore[method-assign]


def remember(model: nn.Module) -> None:
    """From now on refuse steps of optimizers of the parameters of `model` without a gradient."""
    _given.add(model)


def require_own(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise `PlanError` if the optimizer has none of the parameters of `module`."""
    mine = {id(p) for p in module.parameters()}
    if mine and mine.isdisjoint(map(id, _parameters(optimizer))):
        raise PlanError(
            "the optimizer has no parameter of this module; make it of the parameters() of the"
            " module that sw.parallelize returned"
        )


def placed_here(optimizer: Optimizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose tensors lie as the parameters do: tiles as they are, wholes cut.

    Raises `StateDictError` for a tile of another place.
    """
    saved = chain.from_iterable(group["params"] for group in given["param_groups"])
    mine = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = dict(given["state"])
    for number, parameter in zip(saved, mine, strict=False):  # torch tells of other numbers
        if number not in state:
            continue
        state[number] = {
            key: as_placed(f"{key} of the optimizer's parameter {number}", value, parameter)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"
            else value
            for key, value in state[number].items()
        }
    return {**given, "state": state}


class _SummedNorms(TorchFunctionMode):
    """Norms along sharded dimensions come out whole instead of as partial norms."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _NORMS and isinstance(found, DTensor):
            whole = [Replicate() if p.is_partial() else p for p in found.placements]
            return found.redistribute(placements=whole)
        return found


class _WholeMatrices(TorchFunctionMode):
    """Sharded tensors that are cast to bfloat16 come out whole."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.bfloat16 and isinstance(found, DTensor):
            return found.redistribute(placements=[Replicate()] * found.device_mesh.ndim)
        return found


_MODES: Mapping[type[Optimizer], type[TorchFunctionMode]] = {
    torch.optim.Adafactor: _SummedNorms,
    torch.optim.Muon: _WholeMatrices,
}
_entered: list[TorchFunctionMode] = []  # at most one; one that an error left behind is used again


def _mode(optimizer: Optimizer) -> type[TorchFunctionMode] | None:
    return next((mode for kind, mode in _MODES.items() if isinstance(optimizer, kind)), None)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook before a step: it splits groups, and enters the mode that tiles need."""
    if _given and all(p.grad is None for p in _parameters(optimizer)):
        _require_no_given(optimizer)
    join_groups(optimizer)  # after an error in the step before
    if (handle := _splits.pop(optimizer, None)) is not None:
        handle.remove()
    # Behind all hooks of the optimizer, which read norms of whole parameters.
    _splits[optimizer] = optimizer.register_step_pre_hook(_split)
    mode = _mode(optimizer)
    if mode is not None and _sharded(optimizer):
        if _entered and not isinstance(_entered[0], mode):  # an error left another one behind
            _entered.pop().__exit__(None, None, None)
        if not _entered:
            _entered.append(mode())
            _entered[0].__enter__()


def _split(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Split the groups for the step; behind its closure, which sets gradients to None itself."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        split_groups(optimizer)
        return None

    def then_split() -> Any:
        found = closure()
        split_groups(optimizer)
        return found

    if len(args) > 1:
        return (args[0], then_split, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_split}


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    join_groups(optimizer)
    if _entered and _mode(optimizer) is not None:
        _entered.pop().__exit__(None, None, None)


def _require_no_given(optimizer: Optimizer) -> None:
    ids = set(map(id, _parameters(optimizer)))
    if any(id(p) in ids for model in _given for p in model.parameters()):
        raise PlanError(
            "no parameter of this optimizer has a gradient, and some are of the model that was"
            " given to sw.parallelize; the module that it returned has its own: make the optimizer"
            " of its parameters()"
        )


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _sharded(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for p in _parameters(optimizer))
