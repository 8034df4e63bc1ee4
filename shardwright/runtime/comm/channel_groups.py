"""Process groups of the channels of step programs: one for each mesh axis and channel."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.layout import Mesh
from shardwright.program.step.channels import axis_of, is_of_messages, members
from shardwright.runtime.backend.base import wait_for
from shardwright.runtime.backend.registry import backend_of


@final
class ChannelGroups(dict[str, dist.ProcessGroup]):
    """The process group of this rank on each channel, which is made when a program first names it.

    The channel of an axis has the group of `device_mesh`. Ranks must make groups in the same order,
    as all of them take part. Modules that share parameters share these groups, and so do copies.

    `make` calls `new_subgroups_by_enumeration`, which numbers groups alike on all ranks, also on
    those that are no members. The names of `use_local_synchronization` depend on how many groups a
    rank has so far, which differs between ranks of a pipeline, and `split_group` is for NCCL alone.
    """

    def __init__(self, device_mesh: DeviceMesh | None, device: torch.device) -> None:
        super().__init__()
        self._device_mesh, self._device = device_mesh, device
        self._named: set[str] = set()  # of all ranks
        if device_mesh is not None:
            assert device_mesh.mesh_dim_names is not None, "its axes are those of a plan"
            names = device_mesh.mesh_dim_names
            self.update((name, device_mesh[name].get_group()) for name in names)
            self._named.update(names)
            self._mesh = Mesh(tuple(zip(names, device_mesh.mesh.shape, strict=True)))

    def __missing__(self, channel: str) -> dist.ProcessGroup:
        self.make((channel,))
        group = self.get(channel)
        assert group is not None, f"this rank is no member of {channel}"
        return group

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def agree(self, channels: Iterable[str]) -> None:
        """Make the groups of the channels that any rank names; a collective of all ranks."""
        named: list[tuple[str, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(named, tuple(channels))
        self.make(sorted(set(chain(*named))))

    def make(self, channels: Iterable[str]) -> None:
        """Make the groups of channels that have none; every rank passes the same ones.

        NCCL makes a communicator at the first message of two ranks, where each waits for the other:
        in a step some would wait in a circle, so a first message is sent here, by all in one order.
        """
        for channel in channels:
            if channel in self._named:
                continue
            self._named.add(channel)
            group, _ = dist.new_subgroups_by_enumeration(self._ranks(channel))
            if group is None:
                continue
            self[channel] = group
            backend_of(group).tune_new_groups()
            if is_of_messages(channel):
                _connect(group, self._device)

    def _ranks(self, channel: str) -> list[list[int]]:
        """The ranks of each group of a channel, for all coordinates along other axes."""
        assert self._device_mesh is not None, "a program on one device has no channels"
        axis = self._mesh.names.index(axis_of(channel))
        along = self._device_mesh.mesh.movedim(axis, -1)
        some = sorted(members(channel, self._mesh))
        found: list[list[int]] = along.reshape(-1, along.shape[-1])[:, some].tolist()
        return found


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """A message from the first rank of two to the other one."""
    backend, byte = backend_of(group), torch.zeros(1, dtype=torch.uint8, device=device)
    sends = dist.get_rank(group) == 0
    begin = backend.begin_send if sends else backend.begin_receive
    wait_for(begin(group, byte, int(sends)), "a first message")
