"""Seconds of updates with the optimizer's state on the device and on the host."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.tables.objective import Duration
from shardwright.planner.tables.update import UpdateTables
from tests.harness.layered_graphs import residual_layers

GRAPH, MESH = residual_layers(3), Mesh.parse("dp=2")


def tables(optimizer, host_bandwidth):
    device = replace(preset("2xH100").device, host_bytes_per_s=host_bandwidth)
    machine = replace(preset("2xH100"), device=device)
    return UpdateTables(GRAPH, MESH, Duration(machine, MESH), optimizer)


@pytest.mark.parametrize("host_bandwidth, copies", [(1e6, True), (1e15, False)])
def test_an_update_takes_as_long_as_its_copies_or_its_kernels(host_bandwidth, copies):
    name, tiles = min(GRAPH.trained), np.array([2**20, 2**24])
    on_host = tables("adamw_on_host", host_bandwidth)
    on_device = tables("adamw", host_bandwidth).seconds(name, tiles)
    assert on_host.seconds_on_device(name, tiles).tolist() == on_device.tolist()
    expected = 2 * tiles / host_bandwidth if copies else on_device
    assert on_host.seconds(name, tiles).tolist() == pytest.approx(expected.tolist())
    assert on_host.spec.resident_of((4, 4)) == 0 and on_host.spec.tensors_of((4, 4)) == 2
