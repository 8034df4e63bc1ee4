"""Probes of operators of every class of the cost model, over sizes.

As in programs, each run makes new results, and backward passes run through autograd.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.profile.timing import Stopwatch

T = TypeVar("T")
MATMUL = ((32, 64, 64), (64, 128, 128), (256, 256, 256), (512, 512, 512), (512, 768, 3072))
MATMUL_ON_GPU = ((1024, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 8192))
CONVOLUTION = ((2, 16, 32), (8, 64, 28), (4, 128, 28))  # batch, channels, height and width
CONVOLUTION_ON_GPU = ((64, 64, 56), (64, 256, 28))
ATTENTION = ((2, 4, 64), (2, 8, 256), (1, 8, 512))  # batch, heads, length
ATTENTION_ON_GPU = ((8, 16, 512), (8, 16, 2048))
ELEMENTS = (2**12, 2**15, 2**18, 2**21)
ELEMENTS_ON_GPU = (2**24, 2**26)
_HEAD, _ROW, _CHAIN = 64, 256, 100
_WIDTH, _BLOCKS = 64, 12
_MOST_COPIES = 256  # of the tensor of one probe
ISSUE = "issue"  # the kind of samples of what a host takes to issue kernels


class ProbeKernel(NamedTuple):
    """A kernel that is bound by memory, and its passes over a tensor; 0: it is not timed."""

    run: Callable[[torch.Tensor], torch.Tensor]
    forward: int
    backward: int  # e.g. 3: gradient in, gradient out, saved tensor


KERNELS = {  # by class and name
    "memory add": ProbeKernel(lambda x: x + x, 2, 0),
    "memory relu": ProbeKernel(F.relu, 2, 3),
    "memory layer_norm": ProbeKernel(lambda x: F.layer_norm(x, (_ROW,)), 2, 3),
    "functions gelu": ProbeKernel(F.gelu, 2, 3),
    "functions tanh": ProbeKernel(torch.tanh, 2, 0),
    "functions softmax": ProbeKernel(lambda x: F.softmax(x, -1), 2, 0),
}
CHANNELS = 64  # of the input of 2 by 2 pooling


def add_all(stopwatch: Stopwatch) -> None:
    """Add one probe for each shape of each class, and one for the time of a launch.

    Products, convolutions and attention are in the dtype that is trained in: bfloat16 on GPUs,
    whose kernels for float32 are others (attention) or compute in narrower dtypes (convolutions).
    Of other dtypes the two largest products are there.
    """
    gpu = stopwatch.device.type == "cuda"
    trained = torch.bfloat16 if gpu else torch.float32
    matmul = MATMUL + MATMUL_ON_GPU * gpu
    for shape in matmul:
        _matmul(stopwatch, shape, trained)
    for dtype in [torch.float64] + [torch.float32] * gpu:
        for shape in matmul[-2:]:
            _matmul(stopwatch, shape, dtype)
    for batch, channels, size in CONVOLUTION + CONVOLUTION_ON_GPU * gpu:
        x = _random(stopwatch, batch, channels, size, size, dtype=trained)
        w = _random(stopwatch, channels, channels, 3, 3, dtype=trained)
        work = 2 * x.numel() * w[0].numel()
        stopwatch.add("convolution", 3 * work, _trained(F.conv2d, x, w, padding=1), alone=True)
    for batch, heads, length in ATTENTION + ATTENTION_ON_GPU * gpu:
        tile = batch, heads, length, _HEAD
        q, k, v = (_random(stopwatch, *tile, dtype=trained) for _ in range(3))
        work = 2 * q.numel() * length
        attention = F.scaled_dot_product_attention
        stopwatch.add("attention", 7 * work, _trained(attention, q, k, v), alone=True)
    for elements in ELEMENTS + ELEMENTS_ON_GPU * gpu:
        for name, kernel in KERNELS.items():
            _memory(stopwatch, name, kernel, elements)
        _pooling(stopwatch, elements)
    stopwatch.add("launch", 2 * _CHAIN, _chain(stopwatch.device), alone=True)
    if gpu:
        layers, kernels = _layers(stopwatch.device)
        stopwatch.add("layers", kernels, layers, alone=True, issued=(ISSUE, kernels))


def _matmul(stopwatch: Stopwatch, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    x, w = _random(stopwatch, m, k, dtype=dtype), _random(stopwatch, n, k, dtype=dtype)
    name = f"matmul {str(dtype).removeprefix('torch.')}"
    stopwatch.add(name, 3 * 2 * m * k * n, _trained(F.linear, x, w), alone=True)


def _memory(stopwatch: Stopwatch, name: str, kernel: ProbeKernel, elements: int) -> None:
    size = elements * torch.float32.itemsize
    count = _copies(stopwatch.device, size)
    given = [_random(stopwatch, elements // _ROW, _ROW) for _ in range(count)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return kernel.run(x.detach())

    stopwatch.add(name, kernel.forward * size, _in_turn(forward, given), alone=True)
    if kernel.backward:
        graphs = [(kernel.run(x), x) for x in given]
        gradient = torch.ones_like(graphs[0][0])

        def back(graph: tuple[torch.Tensor, torch.Tensor]) -> object:
            return torch.autograd.grad(*graph, gradient, retain_graph=True)

        run = _in_turn(back, graphs)
        stopwatch.add(f"{name} backward", kernel.backward * size, run, alone=True)


def _copies(device: torch.device, size: int) -> int:
    """The number of tensors of `size` bytes that a GPU's cache does not hold: each is read anew.

    One on CPUs, whose probes wait for each run.
    """
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_COPIES, max(1, math.ceil(4 * cache / size)))


def _in_turn(run: Callable[[T], object], given: Sequence[T]) -> Callable[[], object]:
    """A function that runs `run` with the next one each time, and keeps as many results."""
    turns, kept = itertools.cycle(given), deque[object](maxlen=len(given))
    return lambda: kept.append(run(next(turns)))


def _pooling(stopwatch: Stopwatch, elements: int) -> None:
    side = math.isqrt(max(4, elements // CHANNELS)) // 2 * 2
    size = CHANNELS * side * side * torch.float32.itemsize
    count = _copies(stopwatch.device, size)
    given = [_random(stopwatch, 1, CHANNELS, side, side).detach() for _ in range(count)]
    run = _in_turn(lambda x: F.max_pool2d(x, 2), given)
    stopwatch.add("pooling", size * 5 // 4, run, alone=True)


def _trained(
    function: Callable[..., torch.Tensor], *given: torch.Tensor, **settings: int
) -> Callable[[], object]:
    """A function that runs `function` forward and backward, to gradients of all `given`."""
    gradient = torch.ones_like(function(*given, **settings))
    return lambda: torch.autograd.grad(function(*given, **settings), given, gradient)


def _chain(device: torch.device) -> Callable[[], object]:
    """A function that runs a chain of tiny kernels, forward and backward."""
    tiny = torch.zeros(8, device=device, requires_grad=True)

    def run() -> object:
        y = tiny
        for _ in range(_CHAIN):
            y = y * 1.0
        return torch.autograd.grad(y.sum(), tiny)

    return run


def _layers(device: torch.device) -> tuple[Callable[[], object], int]:
    """A function that trains small layers, as models call them, and the number of its operators.

    The host takes longer to issue them than the device to compute them.
    """
    blocks = (
        nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU())
        for _ in range(_BLOCKS)
    )
    model = nn.Sequential(*blocks).to(device)
    x = torch.zeros(_WIDTH, _WIDTH, device=device)
    trained = list(model.parameters())

    def run() -> object:
        return torch.autograd.grad(model(x).sum(), trained)

    # Forward and backward: one and three kernels of a norm, one and three of a product with its
    # bias, one and one of the function; and the sum.
    return run, 10 * _BLOCKS + 1


def _random(stopwatch: Stopwatch, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_()
