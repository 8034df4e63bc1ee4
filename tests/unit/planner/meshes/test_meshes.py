import pytest

from shardwright.planner.meshes.meshes import factorisations, meshes_of


@pytest.mark.parametrize(
    "devices, axes, meshes",
    [
        (1, 2, ["dp=1"]),
        (7, 3, ["dp=7"]),
        (6, 2, ["dp=6", "dp=2 tp=3", "dp=3 tp=2"]),
        (8, 1, ["dp=8"]),
        (8, 3, ["dp=8", "dp=2 tp=4", "dp=4 tp=2", "dp=2 sp=2 tp=2"]),
    ],
)
def test_every_factorisation_is_a_mesh(devices, axes, meshes):
    assert [str(mesh) for mesh in meshes_of(devices, axes)] == meshes


def test_factors_multiply_to_the_number():
    found = list(factorisations(24, 3))
    assert all(a * b * c == 24 for a, b, c in found)
    assert len(set(found)) == len(found) == 9
