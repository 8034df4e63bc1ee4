"""Small graphs on two ranks with uneven tiles: some assignments of tilings, against one device."""

import random

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.layout import Layout, Mesh
from shardwright.rules.placements import tiling_text, tilings
from tests.harness.ranks import run_ranks, whole

ASSIGNMENTS = 4  # random ones, beside the one that splits whatever can be split
TOLERANCE = 1e-11


def check_on_two_ranks(subjects):
    """Every subject, by name, gives on two ranks the loss and gradients of one device."""
    run_ranks(2, _compare, {k: (one, _found(one, one.one_device())) for k, one in subjects.items()})


def _found(one, module):
    return {k: whole(v) for k, v in one.run(module).items() if v is not None}


def _compare(subjects):
    mesh = Mesh.parse("a=2")
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    for name, (one, expected) in subjects.items():
        draw = random.Random(name)
        options = {
            op.name: [tiling for tiling, _ in tilings(one.analysis.rules[op.name], mesh)]
            for op in one.graph.ops
        }
        split = {op: [t for t in found if t != (None,)] or found for op, found in options.items()}
        storage = {leaf.name: Layout.replicated(mesh) for leaf in one.graph.leaves}
        for number in range(1 + ASSIGNMENTS):
            choices = options if number else split
            chosen = {op: draw.choice(found) for op, found in choices.items()}
            found = _found(one, one.module(mesh, chosen, storage, device_mesh))
            assert found.keys() == expected.keys()
            tiled = {op: " ".join(tiling_text(tiling)) for op, tiling in chosen.items()}
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[key],
                    value,
                    rtol=TOLERANCE,
                    atol=TOLERANCE,
                    equal_nan=True,
                    msg=lambda text, key=key, name=name, tiled=tiled: (
                        f"{name} {key} {tiled} {text}"
                    ),
                )
