"""Point-to-point exchange along a mesh axis inside one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from torch.distributed.device_mesh import DeviceMesh

from shardwright.runtime.backend.base import Messages
from shardwright.runtime.backend.registry import backend_of

Wait = Callable[[], None]


class P2PGroup(Protocol):
    """The devices along an axis, who send each other tensors."""

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """Start to send and to receive, each with the other device's place along the axis.

        What one device sends another arrives in that order. Returns a function that waits.
        """


@final
class AxisGroup:
    """The devices along one axis of a device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """Exchange by point-to-point operations in one batch."""
        works = backend_of(self._group).begin_messages(self._group, sends, receives)
        alive = [*sends, *receives]  # until they were waited for

        def wait() -> None:
            for work in works:
                work.wait()
            alive.clear()

        return wait
