from shardwright.ir.layout import Layout, Mesh
from shardwright.rules.rule import PassPartial, Split
from shardwright.simulate.costs.tile_sizes import local_bytes, local_sizes
from tests.harness.small_graphs import MM, rule

MESH = Mesh.parse("dp=2 tp=4")


def test_local_sizes_are_those_of_the_largest_tile():
    assert local_sizes(MM, (None, None), MESH) == (8, 16, 32)
    assert local_sizes(MM, (Split("m"), Split("k")), MESH) == (4, 4, 32)
    assert local_sizes(MM, (PassPartial(0), Split("n")), MESH) == (8, 16, 8)
    uneven = rule("a -> a", a=7)
    assert local_sizes(uneven, (Split("a"), Split("a")), MESH) == (1,)
    assert local_sizes(uneven, (Split("a"), None), MESH) == (4,)


def test_local_bytes_are_those_of_the_largest_tile():
    layout = Layout.parse("dp:S(0) tp:S(1.1)", MESH)
    assert local_bytes(((7,), (3, 9)), 2, layout) == 4 * 3 * 3 * 2
    assert local_bytes((), 4, Layout.replicated(MESH)) == 4
