"""The origin of each figure of a preset, and of other machines."""

import pytest

from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.fitted import FITTED
from shardwright.machine.gpus import GPUS
from shardwright.machine.model import Machine
from shardwright.machine.presets import preset
from shardwright.machine.provenance import FigureKind, origins


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.kind)
def test_every_figure_of_a_preset_has_an_origin(gpu):
    machine = preset(f"2x{min(8, gpu.host_gpus)}x{gpu.kind}")
    found = {one.figure: one for one in origins(machine)}
    assert all(one.source for one in found.values())
    assert found["memory_bandwidth"].kind is FigureKind.SPECIFIED
    assert found["memory"].kind is (
        FigureKind.SPECIFIED if gpu.memory_source else FigureKind.ASSUMED
    )
    assert {name for name, one in found.items() if one.kind is FigureKind.FITTED} == set(FITTED)
    assert machine.device.efficiency.matmul == FITTED["efficiency.matmul"].of(gpu.architecture)
    assert machine.device.memory_bytes == int(gpu.memory_gib * 2**30)


def test_an_architecture_with_rows_has_its_own_figure():
    ampere, volta = (FITTED["efficiency.matmul"].of(name) for name in ("ampere", "volta"))
    assert ampere != volta == FITTED["efficiency.matmul"].of("")


def test_changed_and_described_machines_have_their_own_provenance():
    machine: Machine = parse_toml(to_toml(preset("8xA100")).replace('"8xA100"', '"our cluster"'))
    (only,) = origins(machine)
    assert (only.kind, only.source) == (FigureKind.ASSUMED, machine.provenance)
    assert len(origins(preset("2xcpu"))) == 1
