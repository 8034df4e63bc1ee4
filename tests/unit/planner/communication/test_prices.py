from itertools import product

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.communication.prices import Prices
from shardwright.planner.tables.layout_codes import FIRST_ATOM, decode, joined
from tests.harness.cost_queries import redistribution_seconds

ATOMS = ((7, 12), (33,))  # odd, so that tiles are uneven


@pytest.mark.parametrize(
    "machine, mesh", [("8xH100", "dp=2 tp=4"), ("4x2xA100", "a=2 b=2 c=2"), ("4xcpu", "a=2 b=2")]
)
def test_all_pairs_at_once_cost_what_they_cost_one_by_one(machine, mesh):
    machine, mesh = preset(machine), Mesh.parse(mesh)
    digits = np.array(list(product(range(FIRST_ATOM + 3), repeat=len(mesh.axes))))
    codes = joined(digits)
    if len(codes) > 25:  # three axes: where two of them shard one atom is what is hard
        twice = (digits[:, :, None] == digits[:, None, :]).sum(axis=(1, 2)) > len(mesh.axes)
        codes = codes[twice & (digits >= FIRST_ATOM).any(axis=1)]
    src, dst = np.repeat(codes, len(codes)), np.tile(codes, len(codes))
    found = Prices(machine, mesh).seconds(ATOMS, 4, src, dst)
    for seconds, a, b in zip(found.tolist(), src.tolist(), dst.tolist(), strict=True):
        layouts = decode(a, ATOMS, mesh), decode(b, ATOMS, mesh)
        assert seconds == pytest.approx(redistribution_seconds(ATOMS, 4, *layouts, machine), 1e-12)
