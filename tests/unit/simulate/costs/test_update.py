"""Seconds of an update."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.ir.options.optimizer_spec import Implementation
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.machine.efficiency_curve import Curve
from shardwright.machine.model import Efficiency
from shardwright.machine.presets import preset
from shardwright.program.step.instructions import Update
from shardwright.simulate.costs.update import (
    UpdatedTile,
    UpdatePrices,
    update_bytes,
    update_seconds,
)

DEVICE = replace(
    preset("2xcpu").device,
    bytes_per_s=1024.0,
    launch_seconds=1.0,
    dispatch_seconds=4.0,
    parameter_seconds=16.0,
    efficiency=Efficiency(memory=0.25, update=0.5),
)


def test_an_unmeasured_update_is_one_kernel():
    device = replace(DEVICE, dispatch_seconds=None)
    assert update_seconds(np.array([256, 512]), "adamw", device, 2).tolist() == [1 + 7, 1 + 14]
    assert update_seconds(np.array([256]), "sgd", device, 2).tolist() == [1 + 3]


def test_a_measured_update_pays_for_every_operator():
    assert update_seconds(np.array([512]), "sgd", DEVICE, 2).tolist() == [16 + 1 + 3]
    assert update_seconds(np.array([512]), "momentum", DEVICE, 2).tolist() == [16 + 3 * 1 + 8]


def test_one_rank_updates_plain_tensors():
    assert update_seconds(np.array([512]), "momentum", DEVICE, 1).tolist() == [3 * 1 + 8]


def test_how_fast_an_update_is_depends_on_what_one_operator_passes_over():
    curve = Curve(((512 * 3.0, 0.25), (2 * 512 * 3.0, 0.5)))
    device = replace(DEVICE, efficiency=Efficiency(update=curve))
    found = update_seconds(np.array([512, 1024]), "sgd", device, 2)
    assert found.tolist() == pytest.approx([16 + 1 + 6, 16 + 1 + 6])


def test_an_update_on_a_gpu_costs_what_its_implementation_does():
    """Of AdamW: 8 operators and 21 passes, or 7 in one kernel; tiles of 1024 bytes a second."""
    gpu = replace(
        preset("1xH100").device,
        bytes_per_s=1024.0,
        launch_seconds=1.0,
        issue_seconds=5.0,
        efficiency=Efficiency(memory=0.5),
    )

    def seconds(name, ranks, size=512):
        return update_seconds(np.array([size]), name, gpu, ranks).tolist()

    assert seconds("adamw_fused", 1) == seconds("adamw_fused", 2) == [1 + 7]
    assert seconds("adamw", 1) == seconds("adamw_foreach", 2) == [1 + 21]
    assert seconds("adamw", 2) == seconds("adamw", 1), "tiles are plain tensors"
    assert seconds("adamw_loop", 2) == seconds("adamw_loop", 1) == [8 * 5], "the host is slower"
    assert seconds("adamw_loop", 2, 8 * 512) == [8 + 8 * 21]
    tiles = [UpdatedTile((100,), 400, 4), UpdatedTile((50,), 200, 4)]
    expected = {"adamw_fused": 0, "adamw_foreach": 600, "adamw_loop": 800}
    for name, size in expected.items():
        spec = optimizer_spec(name)
        assert update_bytes(spec, tiles, spec.implementation) == size


def test_copies_of_state_hide_the_update_or_are_hidden_by_it():
    device = replace(DEVICE, host_bytes_per_s=100.0)
    assert update_seconds(np.array([200, 50]), "adamw_on_host", device, 2).tolist() == [4.0, 1.0]
    names, in_groups = (("v", "dv"), ("w", "dw")), Update((), groups=(1, 1), on_host=True)
    update = replace(in_groups, parameters=names)
    copied = UpdatePrices({"v": 1.0, "w": 1.0}, 0.5, {"v": 4.0, "w": 4.0}, 4.0)
    # All copies from the host, and that of the last group back.
    assert copied.of(update) == (2.5, 8 + 4 - 2.5)
    hidden = replace(copied, seconds={"v": 9.0, "w": 9.0})
    assert hidden.of(update) == (18.5, 4 + 4)  # of the first group, and of the last
    assert copied.of(replace(update, groups=())) == (2.5, 8 + 4 - 2.5)
    assert replace(copied, streams=False).of(update) == (2.5, 16)  # the processor copies
    assert copied.of(replace(update, on_host=False)) == (2.5, 0)
    twice = replace(copied, copies={"w": 4.0}, seconds={"v": 1.0, "w": 2.0})
    assert twice.standing_for({"v": "w"}).of(replace(update, parameters=names[1:]))[0] == 3.5


def test_the_host_updates_at_the_rate_of_its_memory_and_needs_none_of_the_device():
    device, sizes = replace(DEVICE, host_bytes_per_s=100.0), np.array([200, 50])
    assert update_seconds(sizes, "adamw_fused_by_host", device, 2).tolist() == [14.0, 3.5]
    assert update_seconds(sizes, "adamw_by_host", device, 2).tolist() == [42.0, 10.5]
    alone = replace(device, host_bytes_per_s=None)
    assert np.isinf(update_seconds(sizes, "adamw_by_host", alone, 2)).all()
    spec, tiles = optimizer_spec("adamw_by_host"), [UpdatedTile((25,), 100, 4)]
    assert update_bytes(spec, tiles) == tiles[0].resident_bytes(spec) == 0
    prices, update = UpdatePrices({"v": 3.0}), Update((("v", "dv"),), by_host=True)
    assert prices.of(update) == (3.0, 0.0)


def test_state_of_three_groups_is_on_the_device_at_once():
    tiles = [UpdatedTile((25,), size, 4) for size in (100, 300, 200, 100)]
    spec = optimizer_spec("adamw_on_host")
    fused, loop = Implementation.FUSED, Implementation.LOOP
    assert update_bytes(spec, tiles, fused) == 2 * 700
    assert update_bytes(spec, tiles, fused, 100) == 2 * (100 + 300 + 200)
    assert update_bytes(spec, tiles, loop, 100) == 2 * (100 + 300 + 200) + 2 * 300
    assert sum(tile.resident_bytes(spec) for tile in tiles) == 0
