from itertools import product

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.communication import matrices
from shardwright.planner.communication.matrices import Matrices
from shardwright.planner.tables.layout_codes import layouts_of
from shardwright.planner.tables.objective import Duration

ATOMS, ITEM = ((8,), (12,)), 4
MACHINE, MESH = preset("2x8xH100"), Mesh.parse("dp=2 tp=4")


@pytest.mark.parametrize("listed", [True, False])
def test_seconds_are_those_of_each_pair(monkeypatch, listed):
    if not listed:
        monkeypatch.setattr(matrices, "_LAYOUTS_LISTED", 0)
    measure = Duration(MACHINE, MESH)
    found = Matrices(measure, MESH)
    some = layouts_of(ATOMS, MESH)[::2]
    sources, targets = np.concatenate([some, some[:1]]), some[::-1]
    seconds = found.between(ATOMS, ITEM, sources, targets)
    for (i, source), (j, target) in product(enumerate(sources), enumerate(targets)):
        alone = measure.redistributions(ATOMS, ITEM, np.array([source]), np.array([target]))
        assert seconds[i, j] == pytest.approx(alone[0], rel=1e-12)
    both = found.pairs(ATOMS, ITEM, some, some[::-1])
    assert both.tolist() == pytest.approx(seconds[: len(some)].diagonal().tolist())


def test_messages_of_parameters_cost_the_part_that_is_not_hidden():
    layouts = layouts_of(ATOMS, MESH)
    measure = Duration(MACHINE, MESH)
    whole = Matrices(measure, MESH).between(ATOMS, ITEM, layouts, layouts)
    exposed = Matrices(measure.of_parameters, MESH).between(ATOMS, ITEM, layouts, layouts)
    least = (1 - MACHINE.overlap) * whole * (1 - 1e-12)
    assert (least <= exposed).all() and (exposed <= whole).all()  # local moves are not hidden
    assert (exposed[whole > 0] < whole[whole > 0]).any()
    again = measure.of_parameters.of_parameters
    assert Matrices(again, MESH).between(ATOMS, ITEM, layouts, layouts).tolist() == exposed.tolist()
