"""Process groups of the channels of a pipeline's step programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.layout import Mesh
from shardwright.program.step.channels import members

Channels = dict[str, dist.ProcessGroup | None]


def channel_groups(
    channels: Sequence[str],
    mesh: Mesh,
    device_mesh: DeviceMesh,
    known: Mapping[str, dist.ProcessGroup | None],
) -> Channels:
    """The process group of each channel of `mesh`, None where this rank is no member.

    Those `known` are not made again. Every rank calls this, as all ranks make all groups, in the
    same order. Each direction between two pipeline groups has a communicator of its own, so that
    no message waits for one the other way.
    """
    found: Channels = {name: device_mesh[name].get_group() for name in mesh.names}
    everywhere = device_mesh.mesh.reshape(mesh.shape[0], -1)
    for channel in channels:
        if channel in known:
            found[channel] = known[channel]
            continue
        some = sorted(members(channel, mesh))
        ranks = [everywhere[some, place].tolist() for place in range(everywhere.shape[1])]
        found[channel] = dist.new_subgroups_by_enumeration(ranks)[0]
    return found
