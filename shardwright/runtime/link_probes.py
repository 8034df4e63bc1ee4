"""Collectives that are timed to know the links, over sizes and levels, and what of them hides.

Redistributions run as programs run them, through DTensor. Along each level of
a mesh (hosts, devices of a host) all groups communicate at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwright.runtime.timing import Stopwatch

KIB = (4, 64, 1024, 8192)  # of the local tile
KIB_ON_GPU = (65536, 262144)
_ROW = 64  # float32 in a row of a tile
_OVERLAP_KIB = _AXES_KIB = 4096

WAYS: dict[str, tuple[Placement, Placement]] = {
    "all_reduce": (Partial(), Replicate()),
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_to_all": (Shard(0), Shard(1)),
}


def add_all(watch: Stopwatch, levels: dict[str, DeviceMesh]) -> None:
    """Probes `LEVEL COLLECTIVE`, of levels with more than one rank, and what happens at once.

    Those are three for a sum beside computing, and three for sums along two axes of the mesh.
    """
    sizes = KIB + KIB_ON_GPU * (watch.device.type == "cuda")
    for level, mesh in levels.items():
        for kib in sizes:
            tile = torch.randn(kib * 256 // _ROW, _ROW, device=watch.device)
            for name, way in _ways(watch.device.type).items():
                _collective(watch, f"{level} {name}", mesh, tile, way)
    if levels:
        _overlap(watch, list(levels.values())[-1])
    _two_axes(watch)


def _ways(kind: str) -> dict[str, tuple[Placement, Placement]]:
    """Those that the library has; torch gathers and cuts where Gloo has no all_to_all."""
    return {name: way for name, way in WAYS.items() if kind == "cuda" or name != "all_to_all"}


def _collective(
    watch: Stopwatch,
    kind: str,
    mesh: DeviceMesh,
    tile: torch.Tensor,
    way: tuple[Placement, Placement],
) -> None:
    src, dst = way
    rows = tile.shape[0] * (mesh.size() if isinstance(src, Shard) else 1)
    shape, stride = torch.Size((rows, _ROW)), (_ROW, 1)

    def once() -> torch.Tensor:
        tensor = DTensor.from_local(tile, mesh, [src], run_check=False, shape=shape, stride=stride)
        return tensor.redistribute(mesh, [dst]).to_local()

    watch.add(kind, tile.numel() * tile.element_size(), once)


def _overlap(watch: Stopwatch, mesh: DeviceMesh) -> None:
    """A sum alone, as much computing alone, and both at once."""
    buffer = torch.zeros(_OVERLAP_KIB * 256, device=watch.device)
    group = mesh.get_group()

    def summed() -> None:
        dist.all_reduce(buffer, group=group)

    x = torch.randn(256, 256, device=watch.device)
    summed()
    seconds = min(watch.once(summed) for _ in range(3))
    each = min(watch.once(lambda: x @ x) for _ in range(3))
    times = torch.tensor([max(1, min(10_000, round(seconds / max(each, 1e-7))))])
    times = times.to(watch.device)
    dist.broadcast(times, 0)
    repeats = int(times.item())

    def computed() -> None:
        for _ in range(repeats):
            x @ x

    def both() -> None:
        work = dist.all_reduce(buffer, group=group, async_op=True)
        computed()
        assert work is not None
        work.wait()

    watch.add("overlap sum", buffer.numel() * 4, summed)
    watch.add("overlap compute", repeats, computed)
    watch.add("overlap both", repeats, both)


def _two_axes(watch: Stopwatch) -> None:
    """A sum along one of two axes that all ranks lie on, along the other, and along both at once.

    The inner one joins neighbours, the outer one what is left. Of a prime number of ranks there
    are no two axes.
    """
    world = dist.get_world_size()
    inner = next((size for size in range(2, world) if world % size == 0), 0)
    if not inner:
        return
    shape, names = (world // inner, inner), ("outer", "inner")
    mesh = init_device_mesh(watch.device.type, shape, mesh_dim_names=names)
    groups = [mesh.get_group(name) for name in names]
    buffers = [torch.zeros(_AXES_KIB * 256, device=watch.device) for _ in names]

    def along(*axes: int) -> Callable[[], None]:
        def run() -> None:
            sums = [dist.all_reduce(buffers[i], group=groups[i], async_op=True) for i in axes]
            for work in sums:
                assert work is not None
                work.wait()

        return run

    size = buffers[0].numel() * 4
    for name, axes in (("outer", (0,)), ("inner", (1,)), ("both", (0, 1))):
        watch.add(f"axes {name}", size, along(*axes))
