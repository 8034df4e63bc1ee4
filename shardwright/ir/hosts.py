"""Devices along a mesh axis that share a host, and tokens that go to a host once.

Tokens that are sent to their experts along an axis over several hosts, each with several of its
devices, go in two hops: once to each host that has some of their experts, to the device at the
sender's place there, and from it to the devices of its host (DeepSeek-AI, "DeepSeek-V3 Technical
Report", arXiv 2412.19437, 2024, 3.2.2). Links between hosts then carry a token once for a host and
not once for a device.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import AXIS, whole_mesh

_FEW = 2  # experts of a token, of which hardly two are on one host


def axis_strides(mesh: Mesh) -> Mapping[str, int]:
    """The distance in ranks of neighbours along each axis of a stage's mesh, outer to inner.

    >>> dict(axis_strides(Mesh.parse("dp=2 ep=8 tp=2")))
    {'dp': 16, 'ep': 2, 'tp': 1}
    """
    whole = mesh if mesh.pipeline is None else whole_mesh(mesh, mesh.pipeline.groups)
    stride, found = whole.size, dict[str, int]()
    for name, size in whole.axes:
        stride //= size
        if mesh.pipeline is None or name != AXIS:
            found[name] = stride
    return found


def neighbours(mesh: Mesh, host_devices: int) -> dict[str, int]:
    """The number of devices of a host along each axis that joins several hosts.

    Axes with a single device of each host are left out, and those that hosts divide unevenly.
    `host_devices` are those of a host; 0 if there is one host.

    >>> neighbours(Mesh.parse("dp=2 ep=8 tp=2"), 8)
    {'ep': 4}
    """
    found = dict[str, int]()
    sizes = dict(mesh.axes)
    for name, stride in axis_strides(mesh).items():
        here, uneven = divmod(host_devices, stride)
        if not uneven and 1 < here < sizes[name] and sizes[name] % here == 0:
            found[name] = here
    return found


def goes_by_host(chosen: int) -> bool:
    """Whether a token with so many experts is sent to hosts first, along axes that join several."""
    return chosen > _FEW
