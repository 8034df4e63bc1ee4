"""Kernels of a linear layer in 8 bits: work and bytes in closed form, and their seconds."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.ir.options.fp8 import FLOAT8, MXFP8, executed_by
from shardwright.machine.model import Efficiency
from shardwright.machine.presets import preset
from shardwright.simulate.costs.compute import backward_kernels, forward_kernels, operator_seconds
from shardwright.simulate.costs.kernels import KernelWork, ProductShape, kernel_seconds
from shardwright.simulate.costs.workload import Fp8Work, OperatorClass, Port, Workload

M, N, K = 2048, 512, 1024
GPU = preset("8xH100").device
X, W, Y, FLOP = M * K, N * K, M * N, 2 * M * N * K


def linear(fp8=None, sizes=(M, N, K), frozen=()):
    m, n, k = range(3)
    grads = [i not in frozen for i in range(2)]
    return Workload(
        kind=OperatorClass.MATMUL,
        dtype="bfloat16",
        sizes=sizes,
        operands=(Port((m, k), 2, grads[0], True), Port((n, k), 2, grads[1], True)),
        results=(Port((m, n), 2, True, False),),
        contracted=(0, 1),
        work=(m, n, k),
        lookup=False,
        extra=Port((m, n), 2, False, False),
        added=(0,),
        fp8=fp8,
    )


def kernels(fp8, **given):
    """(FLOP, bytes) of the kernels forward and backward."""
    work, sizes = linear(fp8, **given), np.array([[M], [N], [K]])
    every = forward_kernels(work, sizes), backward_kernels(work, sizes)
    return tuple([(int(one.flop[0]), int(one.moved[0])) for one in found] for found in every)


PRODUCTS = [(FLOP, X + W + 2 * Y)], [(FLOP, Y + W + 2 * X), (FLOP, Y + X + 2 * W)]


def test_tensorwise_by_torchao_casts_input_and_weight_twice():
    forward, backward = kernels(Fp8Work(executed_by("tensorwise", compiled=True), True, 1.0))
    assert forward == [(0, 2 * X), (0, 3 * X), (0, 2 * W), (0, 3 * W), *PRODUCTS[0]]
    assert backward == [(0, 2 * Y), (0, 4 * Y), (0, 3 * W), (0, 3 * X), *PRODUCTS[1]]


def test_rowwise_transposes_before_it_casts_again():
    forward, backward = kernels(Fp8Work(executed_by("rowwise", compiled=True), True, 1.0))
    assert forward == [(0, 3 * X), (0, 3 * W), *PRODUCTS[0]]
    turned = [(0, 4 * W), (0, 3 * W), (0, 4 * X), (0, 3 * X)]
    assert backward == [(0, 5 * Y), (0, 3 * Y), *turned, *PRODUCTS[1]]


def test_transformer_engine_writes_both_layouts_at_once_and_weights_once_a_step():
    forward, backward = kernels(Fp8Work(executed_by("delayed", compiled=False), True, 1 / 4))
    assert forward == [(0, 4 * X), (0, W), *PRODUCTS[0]]
    assert backward == [(0, 4 * Y), *PRODUCTS[1]]
    later, _ = kernels(Fp8Work(executed_by("delayed", compiled=False), False, 1 / 4))
    assert later == forward[1:], "another layer has cast this input"


def test_scales_of_blocks_are_moved_too():
    forward, _ = kernels(Fp8Work(executed_by("mxfp8", compiled=False), True, 1.0))
    both = 2 + 2 * (1 + 1 / 32)
    assert forward == [(0, both * X), (0, both * W), (FLOP, (X + W) * (1 + 1 / 32) + 2 * Y)]


def test_a_frozen_weight_and_an_input_without_gradient_need_no_casts_for_them():
    fp8 = Fp8Work(executed_by("tensorwise", compiled=True), True, 1.0)
    _, frozen = kernels(fp8, frozen=(1,))
    assert frozen == [(0, 2 * Y), (0, 4 * Y), (0, 3 * W), PRODUCTS[1][0]]
    _, first = kernels(fp8, frozen=(0,))
    assert first == [(0, 2 * Y), (0, 4 * Y), (0, 3 * X), PRODUCTS[1][1]]


def product(dtype, rate=1.0, size=2**13):
    shape = ProductShape(*(np.array([n]) for n in (size, size, size, 1)))
    flop, nothing = np.array([2 * size**3]), np.array([0])
    return KernelWork(OperatorClass.MATMUL, dtype, flop, nothing, shape, rate=rate)


def test_products_run_at_the_peak_of_8_bits_and_their_tiles_start_as_late():
    plain = replace(GPU, launch_seconds=0.0, efficiency=Efficiency(matmul=0.5, float8=0.25))
    eighth, half = (
        kernel_seconds(product(FLOAT8), plain),
        kernel_seconds(product("bfloat16"), plain),
    )
    deep = [2**13 / (2**13 + n * plain.product_depth) for n in (2, 1)]
    peaks = [plain.peak_flop_per_s(dtype) for dtype in (FLOAT8, "bfloat16")]
    assert (eighth / half)[0] == pytest.approx(
        (0.5 * peaks[1] * deep[1]) / (0.25 * peaks[0] * deep[0]), rel=1e-3
    )
    same = replace(plain, efficiency=Efficiency(matmul=0.5))
    assert kernel_seconds(product(FLOAT8), same) == pytest.approx(eighth / 2)
    assert kernel_seconds(product(FLOAT8, rate=0.5), plain) == pytest.approx(2 * eighth)
    blackwell = preset("8xB200").device
    assert kernel_seconds(product(MXFP8), blackwell) == kernel_seconds(product(FLOAT8), blackwell)


def test_the_host_issues_casts_while_the_device_multiplies():
    hosted = replace(GPU, issue_seconds=1.0)
    nothing = np.array([0])
    cast = KernelWork(OperatorClass.MEMORY, "bfloat16", nothing, nothing, queued=True)
    assert kernel_seconds(cast, hosted)[0] == hosted.launch_seconds


@pytest.mark.parametrize(
    ("m", "k", "n", "published"),
    [  # the examples of torchao's former page (pytorch/ao at 0cf1281a), and pytorch/ao#2185
        (1024, 2048, 1024, 0.80),
        (4096, 8192, 16384, 1.39),
        (16384, 8192, 1280, 1.11),
        (16384, 1024, 8192, 1.43),
        (16384, 8192, 7168, 1.73),
        (16384, 3584, 8192, 1.71),
    ],
)
def test_layers_gain_what_was_measured_and_small_ones_lose(m, k, n, published):
    """Forward and backward pass over that in bfloat16, on an H100 of 500 W."""
    device = replace(preset("8xH100-96").device, issue_seconds=0.0)  # in a trace of kernels
    fp8 = Fp8Work(executed_by("tensorwise", compiled=True), True, 1.0)
    sizes = np.array([[m], [n], [k]])
    half, eighth = (
        operator_seconds(linear(one, (m, n, k)), sizes, device)[0] for one in (None, fp8)
    )
    assert half / eighth == pytest.approx(published, rel=0.2)
    assert (half < eighth) == (published < 1)
