"""Names of the channels that step programs communicate on.

A channel is one communicator. Its name is a mesh axis, whose devices take part, or the pipeline's
axis with some of its groups: `pp:0>1` is for messages from group 0 to group 1, `pp:0,3` for
collectives of groups 0 and 3. Messages in two directions are on two channels, as the operations of
one communicator run in the order in which they are started. `dp:gathers` is a second communicator
of the devices along `dp`, for copies of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import AXIS

_SEPARATORS = re.compile("[>,]")
_GATHERS = "gathers"


def link(source: int, target: int) -> str:
    """The channel of messages from one pipeline group to another.

    >>> link(0, 1)
    'pp:0>1'
    """
    return f"{AXIS}:{source}>{target}"


def between(groups: Sequence[int]) -> str:
    """The channel of collectives of some of the pipeline's groups.

    >>> between((0, 3))
    'pp:0,3'
    """
    return f"{AXIS}:{','.join(map(str, groups))}"


def gathers(axis: str) -> str:
    """The channel of copies of parameters where reductions along the axis have another.

    >>> gathers("dp")
    'dp:gathers'
    """
    return f"{axis}:{_GATHERS}"


def axis_of(channel: str) -> str:
    """The mesh axis along which a channel's devices lie."""
    return channel.partition(":")[0]


def is_of_messages(channel: str) -> bool:
    """Whether a channel is for messages from one pipeline group to another."""
    return ">" in channel


def members(channel: str, mesh: Mesh) -> tuple[int, ...]:
    """The coordinates, along its axis, of a channel's devices.

    >>> mesh = Mesh.parse("pp=4 dp=2")
    >>> members("pp:0>3", mesh), members("dp", mesh), members("dp:gathers", mesh)
    ((0, 3), (0, 1), (0, 1))
    """
    axis, _, some = channel.partition(":")
    if some not in ("", _GATHERS):
        return tuple(map(int, _SEPARATORS.split(some)))
    return tuple(range(dict(mesh.axes)[axis]))
