"""Point-to-point exchange along a mesh axis inside one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Sends = Sequence[tuple[int, Tensor]]  # to whom, along the axis, and what
Wait = Callable[[], None]


class P2PGroup(Protocol):
    """The devices along an axis, who send each other tensors."""

    def exchange(self, sends: Sends, receives: Sends) -> Wait:
        """Set out `sends`, and what comes from others into the tensors of `receives`.

        What one device sends another arrives in that order.
        """


@final
class AxisGroup:
    """The devices along one axis of a device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()

    def exchange(self, sends: Sends, receives: Sends) -> Wait:
        """As `P2PGroup` says, by point-to-point operations in one batch."""
        operations = [
            dist.P2POp(how, tensor, group=self._group, group_peer=peer)
            for how, given in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in given
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()
            operations.clear()  # they keep the tensors alive that are on their way

        return wait
