"""Probes of collectives over sizes and levels, their overlap with computation, and contention.

Redistributions run as in programs (`runtime/comm/collectives.py`). Along each level of a mesh
(hosts, devices of a host) all groups communicate at the same time. On CPUs, ranks compute between
two collectives, as in a step, so that some arrive later than others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.ir.layout import Shard
from shardwright.ir.redistribution import MOVING, Collective
from shardwright.profile.timing import Stopwatch
from shardwright.program.instructions import Move
from shardwright.runtime.backend.base import Waited
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.collectives import collected

Run = Callable[[], None]
Begin = Callable[[torch.Tensor], Waited]

KIB = (4, 64, 1024, 8192)  # KiB of the local tile
KIB_ON_GPU = (65536, 262144)
_ROW = 64  # elements of float32 in a row of a tile
_AXES_KIB = 4096
_MOST_GATHERED = 2**30  # bytes of gathered buffers, whatever the number of ranks
_TIMES = 4  # repeats of probes whose times are subtracted; their mean counts
_IN_FLIGHT, _FLIGHT_SECONDS = 4, 20e-3  # the most collectives beside computation, and seconds
# KiB of the local tile of collectives beside computation, and the side of the square matrices that
# are multiplied there. While a GPU waits for its host, which needs microseconds to issue a product,
# a collective delays nothing: its products take milliseconds.
_BESIDE, BESIDE_ON_GPU = (4096, 256), (65536, 4096)
_HIDING_SECONDS = 40e-3  # seconds of computation beside collectives, unless these take longer
_LONGER = 4  # the longest computation, relative to the collectives
_BETWEEN_SECONDS = 4e-3  # seconds of computation between two collectives


def add_all(stopwatch: Stopwatch, levels: dict[str, DeviceMesh]) -> None:
    """Add probes of collectives, of their overlap with computation, and of contention.

    Those of collectives are named `LEVEL COLLECTIVE`; their work is the bytes of the local tile.
    Overlap is that on the last, outermost level. `levels` have more than one rank each.
    """
    sizes = KIB + KIB_ON_GPU * (stopwatch.device.type == "cuda")
    between = _computing(stopwatch) if levels and stopwatch.device.type == "cpu" else None
    for level, mesh in levels.items():
        for kib in sizes:
            tile = torch.randn(kib * 256 // _ROW, _ROW, device=stopwatch.device)
            size = tile.numel() * tile.element_size()
            for kind in MOVING:
                if kind is Collective.ALL_GATHER and size * mesh.size() > _MOST_GATHERED:
                    continue
                move = _move(kind, level, mesh, tile)
                once = partial(collected, tile, move, mesh)
                stopwatch.add(f"{level} {kind.value}", size, once, after=between)
    if levels:
        _overlap(stopwatch, list(levels.values())[-1])
    _contention(stopwatch)


def _computing(stopwatch: Stopwatch) -> Callable[[], None]:
    """A function that computes for a few milliseconds, with equal work on every rank."""
    square, long = torch.randn(256, 256), torch.randn(2**18)

    def once() -> None:
        square @ square
        long.relu()

    once()
    return _repeated(stopwatch, once, _BETWEEN_SECONDS)


def _repeated(
    stopwatch: Stopwatch, once: Callable[[], object], seconds: float
) -> Callable[[], None]:
    """A function that repeats `once`, on every rank as often as takes `seconds` on rank 0."""
    each = min(stopwatch.once(once) for _ in range(3))
    repeats = _broadcast_from_rank_0(
        max(1, min(10_000, round(seconds / max(each, 1e-7)))), stopwatch
    )

    def run() -> None:
        for _ in range(repeats):
            once()

    return run


def _broadcast_from_rank_0(number: int, stopwatch: Stopwatch) -> int:
    """The `number` of rank 0, on every rank."""
    shared = torch.tensor([number], device=stopwatch.device)
    dist.broadcast(shared, 0)
    return int(shared.item())


def _move(kind: Collective, axis: str, mesh: DeviceMesh, tile: torch.Tensor) -> Move:
    """A redistribution step of this `kind` from a `tile` (rows, columns) on every rank."""
    before, after = (placement is Shard for placement in kind.change)
    src, dst = 0 if before else -1, int(before) if after else -1  # the sharded dimensions
    rows, columns = tile.shape
    whole = (rows * mesh.size() if src == 0 else rows, columns)
    step = -(-whole[dst] // mesh.size()) if dst >= 0 else 0
    start = min(mesh.get_local_rank() * step, whole[dst])
    length = min(step, whole[dst] - start)
    return Move(axis, kind, whole, src, dst, start, length, True)


def _overlap(stopwatch: Stopwatch, mesh: DeviceMesh) -> None:
    """Add probes of computation alone, and with collectives in flight, as in a step.

    All-reduces, as of gradients, are all in flight at once; all-gathers, as of parameters, one
    after the other. Computation takes some tens of milliseconds: on CPUs less hides nothing,
    because the sending threads get a core only at ticks of the scheduler. A barrier follows both
    probes, so that their difference does not include straggler time.
    """
    kib, side = _BESIDE if stopwatch.device.type == "cpu" else BESIDE_ON_GPU
    group, rank, elements = mesh.get_group(), mesh.get_local_rank(), kib * 256
    x = torch.randn(side, side, device=stopwatch.device)
    mark = torch.zeros(1, device=stopwatch.device)
    backend = backend_of(group)

    def gather(buffer: torch.Tensor) -> Waited:
        return backend.begin_gather(group, buffer, rank)

    def barrier() -> None:
        backend.begin_reduce(group, mark).wait()

    gathered = min(elements, _MOST_GATHERED // (4 * _IN_FLIGHT * mesh.size()))
    for kind, begin, tile, tiles, at_once in (
        (Collective.ALL_REDUCE, partial(backend.begin_reduce, group), elements, 1, True),
        (Collective.ALL_GATHER, gather, gathered, mesh.size(), False),
    ):
        buffers = [torch.zeros(tile * tiles, device=stopwatch.device)]
        alone = partial(_overlapped, lambda: None, lambda: None, begin, buffers)
        alone()
        one = min(stopwatch.once(alone) for _ in range(3))
        count = _broadcast_from_rank_0(
            max(1, min(_IN_FLIGHT, round(_FLIGHT_SECONDS / max(one, 1e-7)))), stopwatch
        )
        buffers += [buffers[0].clone() for _ in range(count - 1)]
        hiding = min(max(count * one, _HIDING_SECONDS), _LONGER * count * one)
        groups = [buffers] if at_once else [[buffer] for buffer in buffers]
        computed = _repeated(stopwatch, lambda: x @ x, hiding / len(groups))
        for _ in range(_TIMES):
            for name, beside in (("compute", [[] for _ in groups]), ("both", groups)):
                run = partial(_each_overlapped, computed, barrier, begin, beside)
                stopwatch.add(f"overlap {kind.value} {name}", 4 * tile, run, times=count)


def _each_overlapped(
    compute: Run, barrier: Run, begin: Begin, groups: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Compute once per group of buffers, with the collectives of that group in flight."""
    for buffers in groups:
        _overlapped(compute, barrier, begin, buffers)


def _overlapped(compute: Run, barrier: Run, begin: Begin, buffers: Sequence[torch.Tensor]) -> None:
    works = [begin(buffer) for buffer in buffers]
    compute()
    for work in works:
        work.wait()
    barrier()


def _contention(stopwatch: Stopwatch) -> None:
    """Add probes of an all-reduce along one of two mesh axes, the other, and both at once.

    The inner axis joins consecutive ranks. A prime number of ranks gets no probes.
    """
    world = dist.get_world_size()
    inner = next((size for size in range(2, world) if world % size == 0), 0)
    if not inner:
        return
    shape, names = (world // inner, inner), ("outer", "inner")
    mesh = init_device_mesh(stopwatch.device.type, shape, mesh_dim_names=names)
    groups = [mesh.get_group(name) for name in names]
    buffers = [torch.zeros(_AXES_KIB * 256, device=stopwatch.device) for _ in names]

    def along(*axes: int) -> Callable[[], None]:
        def run() -> None:
            for work in [backend_of(groups[i]).begin_reduce(groups[i], buffers[i]) for i in axes]:
                work.wait()

        return run

    size = buffers[0].numel() * 4
    for name, axes in (("outer", (0,)), ("inner", (1,)), ("both", (0, 1))) * _TIMES:
        stopwatch.add(f"axes {name}", size, along(*axes))
