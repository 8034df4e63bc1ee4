"""Point-to-point exchange along a mesh axis inside one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from torch.distributed.device_mesh import DeviceMesh

from shardwright.runtime.backend.base import Messages
from shardwright.runtime.backend.registry import backend_of

Wait = Callable[[], None]


class P2PGroup(Protocol):
    """The devices along an axis, which send tensors to each other."""

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """Start sends and receives; each names the position of the other device along the axis.

        Messages between two devices arrive in the order sent. Returns a function that waits.
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
