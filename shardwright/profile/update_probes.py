"""Probes of trained parameters: overheads of loading and gradients, packing, and updates.

Parameters are DTensors, and the dispatch of an operator on a DTensor takes many times as long as
the launch of a kernel. Loading and packing run Python code after operators that have filled the
CPU's caches; the probes fill them before, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright.profile.timing import Stopwatch
from shardwright.runtime.comm.tile_split import (
    TileSplit,
    gather_buffer,
    gathered,
    scatter_buffer,
)
from shardwright.runtime.parameters.dtensor_spec import DTensorSpec, local
from shardwright.runtime.regions.gradient_nodes import Gradients, with_nodes

ELEMENTS = (2**15, 2**18, 2**21, 2**23)
_ALL = 2**22  # elements of all parameters of an update, more than fit into caches
ELEMENTS_ON_GPU = (2**24,)
_ROW = 64
_COUNT = 16  # tiny parameters
HANDLED = 3  # times that a parameter is packed or unpacked, its gradient included
_LEFT = 2**22  # elements of an operator that fills the caches
CALLS, PASSES = 8, 21  # of AdamW: operators of an update, and passes over a parameter


def add_all(stopwatch: Stopwatch) -> None:
    """Add probes "dispatch", "parameter" and "packing" of tiny parameters, and "update".

    The work of the first three is a number of operators, parameters and packings, so that a sample
    gives seconds for one; that of "update" is bytes of memory traffic.
    """
    mesh = init_device_mesh(stopwatch.device.type, (dist.get_world_size(),))
    tiny = _parameters(mesh, 2 * _ROW, _COUNT)
    stopwatch.add("dispatch", CALLS * _COUNT, _updated(tiny), alone=True)
    left = partial(torch.relu, torch.randn(_LEFT, device=stopwatch.device))
    stopwatch.add("parameter", _COUNT, _loaded(tiny), alone=True, after=left)
    stopwatch.add("packing", HANDLED * _COUNT, _packed(mesh), alone=True, after=left)
    gpu = stopwatch.device.type == "cuda"
    for elements in ELEMENTS + ELEMENTS_ON_GPU * gpu:
        # As in training, the other parameters are updated between two updates of one.
        count = max(1, _ALL // elements)
        some = _updated(_parameters(mesh, elements, count))
        stopwatch.add("update", PASSES * 4 * elements, some, alone=True, times=count)


def _parameters(mesh: DeviceMesh, elements: int, count: int) -> list[nn.Parameter]:
    local = torch.randn(elements // _ROW, _ROW, device=mesh.device_type)
    return [
        nn.Parameter(DTensor.from_local(local.clone(), mesh, [Replicate()], run_check=False))
        for _ in range(count)
    ]


def _updated(parameters: Sequence[nn.Parameter]) -> Callable[[], object]:
    """A function that updates all parameters with AdamW."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(parameters).step


class _NoProgram:
    """A stand-in for a call of a program, which computes nothing and returns given gradients."""

    def __init__(self, places: Sequence[DTensorSpec], tiles: Sequence[torch.Tensor]) -> None:
        self.places, self.tiles = places, tiles

    def results(self) -> tuple[torch.Tensor, ...]:
        return (self.tiles[0].new_zeros(()),)

    def constants(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return results[1:]

    def begin(self, gradients: Gradients, kept: Sequence[torch.Tensor]) -> None:
        del gradients, kept

    def gradients(self, group: int) -> Gradients:
        del group
        pairs = zip(self.places, self.tiles, strict=True)
        return [place.whole(tile) for place, tile in pairs]


def _loaded(parameters: Sequence[nn.Parameter]) -> Callable[[], object]:
    """A function that loads all parameters into a program and returns their gradients."""
    stored = [nn.Parameter(parameter.detach()) for parameter in parameters]
    places = [DTensorSpec(parameter) for parameter in stored if isinstance(parameter, DTensor)]

    def run() -> None:
        with torch.no_grad():
            tiles = [local(parameter).detach().requires_grad_() for parameter in stored]
            gradients = [torch.ones_like(tile) for tile in tiles]
        (result,) = with_nodes(_NoProgram(places, gradients), [stored], [])
        result.backward()
        for parameter in stored:
            parameter.grad = None

    return run


def _packed(mesh: DeviceMesh) -> Callable[[], object]:
    """A function that packs tiny sharded parameters, unpacks them, and packs gradients."""
    parts = [TileSplit((mesh.size(), _ROW), 0, mesh.size()) for _ in range(_COUNT)]
    tiles = [torch.randn((1, _ROW), device=mesh.device_type) for _ in parts]

    def run() -> None:
        scatter_buffer(parts, gathered(parts, gather_buffer(parts, tiles, 0)))

    return run
