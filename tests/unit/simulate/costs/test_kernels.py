"""Seconds of kernels: a roofline, tiles and waves of products, and the host that issues them."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.machine.presets import preset
from shardwright.simulate.costs.compute import backward_kernels, forward_kernels
from shardwright.simulate.costs.kernels import KernelWork, ProductShape, filled, kernel_seconds
from shardwright.simulate.costs.workload import OperatorClass, Port, Workload

GPU = replace(preset("8xA100").device, issue_seconds=0.0)
B, N, K = range(3)  # factors of a linear operator


def shape(rows, columns, depth, count=1):
    return ProductShape(*(np.array([size]) for size in (rows, columns, depth, count)))


def product(rows, columns, depth):
    flop, moved = np.array([2 * rows * columns * depth]), np.array([rows * columns])
    return KernelWork(OperatorClass.MATMUL, "bfloat16", flop, moved, shape(rows, columns, depth))


def test_a_large_product_reaches_its_efficiency_and_small_ones_less():
    large = product(2**15, 2**15, 2**13)
    peak = GPU.peak_flop_per_s("bfloat16") * GPU.efficiency.matmul
    assert kernel_seconds(large, GPU)[0] == pytest.approx(large.flop[0] / peak, rel=0.02)
    parts = [filled(shape(2**n, 2**n, 2**13), GPU)[0] for n in range(7, 15)]
    assert parts == sorted(parts)
    assert filled(shape(129, 2**14, 2**13), GPU) < 0.6 * filled(shape(2**8, 2**14, 2**13), GPU)
    assert filled(shape(2**14, 2**14, 64), GPU) < 0.6 * filled(shape(2**14, 2**14, 2**12), GPU)


def test_a_device_without_units_does_not_ask_for_the_shape():
    plain = replace(GPU, units=0)
    seconds = kernel_seconds(product(128, 128, 2**13), plain)[0]
    reached = plain.peak_flop_per_s("bfloat16") * plain.efficiency.matmul
    assert seconds == pytest.approx(2 * 128 * 128 * 2**13 / reached + plain.launch_seconds)


def test_the_host_sets_the_pace_of_small_kernels_only():
    small, large = product(64, 64, 64), product(2**13, 2**13, 2**13)
    hosted = replace(GPU, issue_seconds=50e-6)
    assert kernel_seconds(small, hosted)[0] == 50e-6 > kernel_seconds(small, GPU)[0]
    assert kernel_seconds(large, hosted) == kernel_seconds(large, GPU)


def test_a_linear_operator_has_a_product_forward_and_two_backward():
    ports = [Port((B, K), 2, True, True), Port((N, K), 2, True, True), Port((N,), 2, True, False)]
    work = Workload(
        kind=OperatorClass.MATMUL,
        dtype="bfloat16",
        sizes=(512, 256, 128),
        operands=tuple(ports),
        results=(Port((B, N), 2, True, False),),
        contracted=(0, 1),
        work=(B, N, K),
        lookup=False,
        extra=Port((), 1, False, False),
    )
    sizes = np.array(work.sizes)[:, None]

    def sizes_of(kernel):
        one = kernel.shape
        return [int(n[0]) for n in (one.rows, one.columns, one.depth, one.count)]

    (forward,) = forward_kernels(work, sizes)
    values, weights, bias = backward_kernels(work, sizes)
    assert sizes_of(forward) == [512, 256, 128, 1]
    assert sizes_of(values) == [512, 128, 256, 1]
    assert sorted(sizes_of(weights)) == [1, 128, 256, 512]
    assert sizes_of(weights)[2] == 512  # rows of the batch are summed
    assert bias.shape is None and bias.flop[0] == 0
