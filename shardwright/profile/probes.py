"""Probes of operators of every class of the cost model, over sizes.

As in programs, each run makes new results, and backward passes run through autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from shardwright.profile.timing import Stopwatch

MATMUL = ((32, 64, 64), (64, 128, 128), (256, 256, 256), (512, 512, 512), (512, 768, 3072))
MATMUL_ON_GPU = ((1024, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 8192))
CONVOLUTION = ((2, 16, 32), (8, 64, 28), (4, 128, 28))  # batch, channels, height and width
CONVOLUTION_ON_GPU = ((64, 64, 56), (64, 256, 28))
ATTENTION = ((2, 4, 64), (2, 8, 256), (1, 8, 512))  # batch, heads, length
ATTENTION_ON_GPU = ((8, 16, 512), (8, 16, 2048))
ELEMENTS = (2**12, 2**15, 2**18, 2**21)
ELEMENTS_ON_GPU = (2**24, 2**26)
_HEAD, _ROW, _CHAIN = 64, 256, 100


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
    """Add one probe for each shape of each class, and one for the time of a launch."""
    gpu = stopwatch.device.type == "cuda"
    matmul = MATMUL + MATMUL_ON_GPU * gpu
    for shape in matmul:
        _matmul(stopwatch, shape, torch.float32)
    for dtype in [torch.float64] + [torch.bfloat16] * gpu:
        for shape in matmul[-2:]:
            _matmul(stopwatch, shape, dtype)
    for batch, channels, size in CONVOLUTION + CONVOLUTION_ON_GPU * gpu:
        x = _random(stopwatch, batch, channels, size, size)
        w = _random(stopwatch, channels, channels, 3, 3)
        work = 2 * x.numel() * w[0].numel()
        stopwatch.add("convolution", 3 * work, _trained(F.conv2d, x, w, padding=1), alone=True)
    for batch, heads, length in ATTENTION + ATTENTION_ON_GPU * gpu:
        q, k, v = (_random(stopwatch, batch, heads, length, _HEAD) for _ in range(3))
        work = 2 * q.numel() * length
        attention = F.scaled_dot_product_attention
        stopwatch.add("attention", 7 * work, _trained(attention, q, k, v), alone=True)
    for elements in ELEMENTS + ELEMENTS_ON_GPU * gpu:
        for name, kernel in KERNELS.items():
            _memory(stopwatch, name, kernel, elements)
        _pooling(stopwatch, elements)
    stopwatch.add("launch", 2 * _CHAIN, _chain(stopwatch.device), alone=True)


def _matmul(stopwatch: Stopwatch, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    x, w = _random(stopwatch, m, k, dtype=dtype), _random(stopwatch, n, k, dtype=dtype)
    name = f"matmul {str(dtype).removeprefix('torch.')}"
    stopwatch.add(name, 3 * 2 * m * k * n, _trained(F.linear, x, w), alone=True)


def _memory(stopwatch: Stopwatch, name: str, kernel: ProbeKernel, elements: int) -> None:
    x = _random(stopwatch, elements // _ROW, _ROW)
    size = x.numel() * x.element_size()
    plain = x.detach()
    stopwatch.add(name, kernel.forward * size, lambda: kernel.run(plain), alone=True)
    if kernel.backward:
        y = kernel.run(x)
        gradient = torch.ones_like(y)

        def back() -> object:
            return torch.autograd.grad(y, x, gradient, retain_graph=True)

        stopwatch.add(f"{name} backward", kernel.backward * size, back, alone=True)


def _pooling(stopwatch: Stopwatch, elements: int) -> None:
    side = math.isqrt(max(4, elements // CHANNELS)) // 2 * 2
    x = _random(stopwatch, 1, CHANNELS, side, side).detach()
    moved = x.numel() * x.element_size() * 5 // 4
    stopwatch.add("pooling", moved, lambda: F.max_pool2d(x, 2), alone=True)


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


def _random(stopwatch: Stopwatch, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_()
