"""Optimizer state by parameter name, independent of plan and order.

`torch.distributed.checkpoint.state_dict` creates the state of parameters that have none by a step
without gradients. A parameter that gets its first gradient later would then be one step ahead of an
uninterrupted run. This module restores exactly the state that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwright.runtime.parameters.host_state import home_like
from shardwright.runtime.parameters.update_groups import state_on_host
from shardwright.train.checkpoint.reading import CheckpointError
from shardwright.train.json_codec import dtype_named, from_json, to_json

_TENSOR = "tensor"

Names = Mapping[int, str]  # of parameters, by id


def tensors_of(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """The tensors of the optimizer's state, by `parameter/key`."""
    return {
        f"{_name(p, names)}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and (p.numel() or id(p) in names)
    }


def facts_of(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """The rest of the optimizer's state, as values for JSON.

    `groups` are the hyperparameters and `members` the parameter names of each group. `state` has,
    by parameter and key, plain values, and the dtype and shape of tensors.
    """
    hyper, members = [], []
    for group in optimizer.param_groups:
        options = {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        hyper.append(to_json(options))
        members.append([_name(p, names) for p in _real(group, names)])
    state = {
        _name(p, names): {key: _fact(value) for key, value in found.items()}
        for p, found in optimizer.state.items()
        if p.numel() or id(p) in names
    }
    return {"groups": hyper, "members": members, "state": state}


def allocate(
    optimizer: torch.optim.Optimizer, names: Names, facts: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Give the optimizer the state of `facts`; return its tensors, which are not initialized.

    Raises `CheckpointError` if the number of parameter groups differs, or if a group has a
    parameter that it had not in the checkpoint.
    """
    mine = [[_name(p, names) for p in _real(group, names)] for group in optimizer.param_groups]
    was = facts["members"]
    if len(mine) != len(was):
        raise CheckpointError(
            f"the optimizer has {len(mine)} parameter groups, the checkpoint has {len(was)};"
            " declare the same groups or start anew"
        )
    for number, (now, then) in enumerate(zip(mine, was, strict=True)):
        if odd := set(now) - set(then):
            raise CheckpointError(
                f"{min(odd)} is in group {number} of the optimizer, in the checkpoint it is not;"
                " declare the same groups or start anew"
            )
    for group, options in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update(
            {key: _like(group.get(key), value) for key, value in from_json(options).items()}
        )
    made = {}
    optimizer.state.clear()
    for parameter in (p for group in optimizer.param_groups for p in _real(group, names)):
        name = _name(parameter, names)
        for key, fact in facts["state"].get(name, {}).items():
            if isinstance(fact, dict) and _TENSOR in fact:
                value = _empty(parameter, key, fact)
                made[f"{name}/{key}"] = value
            else:
                value = from_json(fact)
            optimizer.state[parameter][key] = value
    return made


def _real(group: Mapping[str, Any], names: Names) -> list[torch.Tensor]:
    """The group's parameters without the empty placeholders of a stage that has none."""
    return [p for p in group["params"] if p.numel() or id(p) in names]


def _name(parameter: torch.Tensor, names: Names) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise CheckpointError(
            f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is not of"
            " the module; make it from the parameters that it is given"
        )
    return name


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _like(now: Any, saved: Any) -> Any:
    """The saved value, as a tensor if the optimizer now has one, e.g. for the learning rate."""
    if isinstance(now, torch.Tensor) and not isinstance(saved, torch.Tensor):
        return torch.full_like(now, saved)
    return saved


def _fact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        on_host = value.device.type == "cpu"
        return {_TENSOR: dtype, "shape": list(value.shape), "host": on_host}
    return to_json(value)


def _empty(parameter: torch.Tensor, key: str, fact: Mapping[str, Any]) -> torch.Tensor:
    """A tensor for state of `parameter`.

    It is sharded like the parameter if it has its shape, else replicated; a count of steps is a
    plain tensor.
    """
    dtype, shape = dtype_named(fact[_TENSOR]), tuple(fact["shape"])
    is_count = not shape and (parameter.dim() > 0 or key == "step")
    if shape == tuple(parameter.shape) and not is_count:
        if id(parameter) in state_on_host():
            return home_like(parameter.detach(), dtype)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if is_count:  # of steps; all but fused optimizers keep it on the host
        device = parameter.device if not fact["host"] else torch.device("cpu")
        return torch.empty((), dtype=dtype, device=device)
    whole = torch.empty(shape, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
