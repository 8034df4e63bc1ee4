"""Loads state dicts: whole tensors are cut, tiles of another rank are refused.

A tile that `torch.load` reads from a file has the device mesh of the rank that wrote it, with that
rank's coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

_INSTEAD = (
    "save with torch.distributed.checkpoint, or each rank its own file, or a whole state dict"
    " (torch.distributed.checkpoint.state_dict with full_state_dict=True)"
)


class StateDictError(ValueError):
    """A state dict that is not this rank's, or cannot be loaded as asked."""


def check_on_load(module: nn.Module, elsewhere: Callable[[], Collection[str]]) -> None:
    """Make `module.load_state_dict` accept whole tensors, and refuse tiles of other ranks.

    Names in `elsewhere`, e.g. parameters of another pipeline stage, are ignored.
    """

    def hook(
        root: nn.Module,
        state: MutableMapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise StateDictError(
                "load_state_dict(assign=True) would replace the parameters that the plan runs on;"
                " leave assign out"
            )
        for name, parameter in root.named_parameters(remove_duplicate=False):
            given = state.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape == parameter.shape:
                state[prefix + name] = as_placed(name, given, parameter)
        for name in elsewhere():
            state.pop(prefix + name, None)
        if type(root).get_extra_state is not nn.Module.get_extra_state:  # which the model has not
            state.setdefault(f"{prefix}_extra_state", root.get_extra_state())

    module.register_load_state_dict_pre_hook(hook)


def as_placed(name: str, given: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`given`, a whole tensor or this rank's tile, converted to the form and layout of `like`.

    Raises `StateDictError` for a tile of another place or of another mesh.
    """
    # Nothing is computed with `given`: results of operators come with another mesh that is equal.
    if not isinstance(given, DTensor):
        return tile_of(given, like) if isinstance(like, DTensor) else given
    if not isinstance(like, DTensor):
        if given.to_local().shape == given.shape:
            return given.to_local()
        raise StateDictError(
            f"{name} in the state dict is one tile of several, {_layout(given)}, and here is one"
            f" device; {_INSTEAD}"
        )
    mesh = like.device_mesh
    if given.device_mesh is mesh:
        return given
    theirs, mine = given.device_mesh.get_coordinate(), mesh.get_coordinate()
    if given.to_local().shape != given.shape:
        if given.device_mesh != mesh:
            raise StateDictError(
                f"{name} in the state dict is a tile of another mesh, {_layout(given)}, here it is"
                f" {_layout(like)}; {_INSTEAD}"
            )
        assert theirs is not None and mine is not None, "a rank has no tiles of other ranks' meshes"
        placed = zip(given.placements, theirs, mine, strict=True)
        if any(isinstance(p, Shard) and there != here for p, there, here in placed):
            raise StateDictError(
                f"{name} in the state dict is the tile at {tuple(theirs)} of {_layout(given)}, and"
                f" this rank is at {tuple(mine)}; {_INSTEAD}"
            )
        return _dtensor(given.to_local().detach(), given.placements, like)
    return tile_of(given.to_local(), like)


def tile_of(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor with the placements of `like`, cut from a tensor that every rank has whole."""
    tile, at = whole.detach(), like.device_mesh.get_coordinate()
    assert at is not None, "a rank has no parameters of meshes that it is not in"
    for placement, index, parts in zip(like.placements, at, like.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            tile = tile.chunk(parts, placement.dim)[index]
    return _dtensor(tile, like.placements, like)


def _dtensor(tile: torch.Tensor, placements: Sequence[Placement], like: DTensor) -> DTensor:
    device = like.to_local().device
    found: DTensor = DTensor.from_local(
        tile.to(device, copy=True).contiguous(),  # not a view, which would keep the whole
        like.device_mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return found


def _layout(tensor: DTensor) -> str:
    names = tensor.device_mesh.mesh_dim_names or range(tensor.device_mesh.ndim)
    sizes = tensor.device_mesh.shape
    axes = zip(names, sizes, tensor.placements, strict=True)
    return ", ".join(f"{name}={size} {placement}" for name, size, placement in axes)
