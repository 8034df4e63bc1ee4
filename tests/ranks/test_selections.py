"""Selections, placements and losses of selected elements on two ranks, however they are split."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.layout import Mesh
from tests.harness.ranks import run_ranks
from tests.unit.tracing.values.test_known_values import MODELS
from tests.zoo.assignments import random_assignments
from tests.zoo.subject import Subject, worst

TRIED = 12  # assignments of each model


@pytest.mark.ranks
def test_models_that_follow_values_equal_one_device():
    subjects = {name: Subject(*make()) for name, make in MODELS.items()}
    run_ranks(2, _compare, {n: (one, one.run(one.one_device())) for n, one in subjects.items()})


def _compare(subjects):
    torch.set_num_threads(1)
    mesh = Mesh.parse("a=2")
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    for name, (one, serial) in subjects.items():
        for assignment in random_assignments(one, mesh, TRIED, name):
            module = one.module(mesh, assignment.chosen, assignment.storage, device_mesh)
            size, key = worst(serial, one.run(module))
            assert size <= 1e-9, f"{name}: {key} is {size:.1e} off under {assignment}"
