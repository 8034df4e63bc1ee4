"""Compares over all ranks what must be equal on them, or must not: batches, the model's weights.

A hash is compared first, in an all-reduce of 16 bytes; only where it differs do ranks tell each
other more, which takes bytes of every rank on every rank.

Each rank takes its part of what it is given. If a sampler or an unset seed gives every rank other
values, they would be put together from several batches, or from several models.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor

from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.device import default_device
from shardwright.tracing.arguments import BatchError

Axes = Sequence[dist.ProcessGroup | None]  # this rank's group along each axis of a mesh

_COMPARED = 4096  # elements at either end of a tensor


def all_equal(value: object, axes: Axes) -> bool:
    """Whether the ranks have equal values, by a hash of their `repr`; a collective.

    Args:
        value: this rank's.
        axes: the process groups along each axis of a mesh, one after the other, or one group.

    Returns:
        The same on all ranks of the mesh.
    """
    own = xxhash.xxh3_64_intdigest(repr(value).encode()) >> 1  # and its negative is an int64 too
    found = torch.tensor([own, -own], device=default_device())
    for axis in axes:
        assert axis is not None, "the rank is in its mesh"
        backend_of(axis).reduce(axis, found, dist.ReduceOp.MAX)
    most, least = found.tolist()
    return bool(most == -least)


def require_same_batch(inputs: Mapping[str, torch.Tensor], axes: Axes) -> None:
    """Raise `BatchError` unless all ranks of the mesh have the same tensors; a collective."""
    if name := _different(inputs, axes):
        raise BatchError(
            f"{name} differs between ranks, and every rank passes the same global batch, of which"
            " it takes its part: use no DistributedSampler, seed all ranks alike, or pass what"
            " local_batch returns"
        )


def require_own_parts(parts: Mapping[str, torch.Tensor], axes: Axes) -> None:
    """Raise `BatchError` if all ranks pass the same tensors as their own parts of a batch.

    A smaller global batch may have the shape of a part. Tensors of one value tell nothing. A
    collective of all ranks of the mesh, also of those whose parts are of one value.
    """
    different = _different(parts, axes)
    varied = {
        name: x for name, x in parts.items() if x.numel() and bool((x != x.flatten()[0]).any())
    }
    if varied and not different:
        name, tensor = next(iter(varied.items()))
        raise BatchError(
            f"{name} of shape {list(tensor.shape)} has the shape of a rank's part, and is the same"
            " on all ranks: pass each rank its own part, or say batch='global' to parallelize if"
            " it is a smaller global batch"
        )


def warn_of_other_weights(weights: Mapping[str, torch.Tensor]) -> None:
    """Warn if the ranks have other tensors; a collective of all ranks."""
    if name := _different(weights, (dist.group.WORLD,)):
        warnings.warn(
            f"{name} differs between ranks, each of which takes its part of it: seed all ranks"
            " alike before the model is built, or load a state dict into the parallel module",
            stacklevel=3,
        )


def _different(tensors: Mapping[str, torch.Tensor], axes: Axes) -> str:
    """The first name of which another rank has other values; no name if there is none."""
    every = [{name: _digest(tensor) for name, tensor in tensors.items() if _is_plain(tensor)}]
    if all_equal(every, axes):
        return ""
    for axis in axes:  # a mesh of several axes has no group of all its ranks
        along: list[list[dict[str, str]]] = [[] for _ in range(dist.get_world_size(axis))]
        dist.all_gather_object(along, every, group=axis)
        every = [one for some in along for one in some]
    names = dict.fromkeys(name for one in every for name in one)
    return next((n for n in names if len({one.get(n) for one in every if n in one}) > 1), "")


def _is_plain(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, DTensor)


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> str:
    """A hash of shape, dtype and the elements at both ends."""
    flat = tensor.detach().reshape(-1)
    found = xxhash.xxh3_128(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    for part in (flat[:_COMPARED], flat[-_COMPARED:]):
        found.update(part.resolve_conj().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
