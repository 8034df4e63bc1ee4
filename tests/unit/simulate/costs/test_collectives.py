from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.layout import PARTIAL, REPLICATE, Layout, Mesh, Shard
from shardwright.ir.redistribution import COLLECTIVES, Collective, Exchange
from shardwright.machine.topology import links
from shardwright.simulate.costs.collectives import (
    StepPrice,
    collective_seconds,
    priced_steps,
    step_price,
)
from tests.harness.cost_queries import redistribution_seconds
from tests.harness.small_graphs import toy_machine

# Four devices, links of 16 B/s and 1 s a hop, 2 s to start a collective.
NCCL, GLOO = toy_machine(4), toy_machine(4, "gloo")
MESH = Mesh.parse("tp=4")


@pytest.mark.parametrize(
    "kind, before, after, seconds",
    [
        (Collective.ALL_GATHER, 64, 256, 2 + 3 + 192 / 16),
        (Collective.REDUCE_SCATTER, 256, 64, 2 + 3 + 192 / 16),
        (Collective.ALL_REDUCE, 256, 256, 2 + 6 + 2 * 192 / 16),
        (Collective.ALL_TO_ALL, 64, 64, 2 + 3 + 48 / 16),
        (Collective.ALL_TO_ALL, 48, 64, 2 + 3 + 48 / 16),  # uneven tiles: the larger counts
        (Collective.SLICE, 256, 64, 1 + 128 / 4096),
        (Collective.MASK, 256, 256, 1 + 256 / 4096),
        (Collective.EMBED, 64, 256, 1 + 320 / 4096),
    ],
)
def test_a_collective_costs_its_ring_formula(kind, before, after, seconds):
    (link,) = links(NCCL, MESH)
    assert collective_seconds(kind, link, before, after, NCCL) == seconds


def test_gloo_scatters_a_sum_by_messages_whose_terms_each_rank_adds_up():
    level = replace(GLOO.levels[0], gather_bytes_per_s=8.0)
    machine = replace(GLOO, levels=(level,))
    (link,) = links(machine, MESH)
    scattered = collective_seconds(Collective.REDUCE_SCATTER, link, 256, 64, machine)
    assert scattered == 2 + 3 + 192 / 8 + 3 * 192 / 4096


def test_gloo_exchanges_as_others_do():
    (link,) = links(GLOO, MESH)
    exchanged = collective_seconds(Collective.ALL_TO_ALL, link, 64, 64, GLOO)
    assert exchanged == collective_seconds(Collective.ALL_TO_ALL, link, 64, 64, NCCL)


def test_gathering_may_be_slower_than_reducing():
    level = replace(NCCL.levels[0], gather_bytes_per_s=8.0)
    machine = replace(NCCL, levels=(level,))
    (link,) = links(machine, MESH)
    assert collective_seconds(Collective.ALL_GATHER, link, 64, 256, machine) == 2 + 3 + 192 / 8
    assert collective_seconds(Collective.REDUCE_SCATTER, link, 256, 64, machine) == 2 + 3 + 12


def test_a_group_of_one_has_nothing_to_send():
    (link,) = links(NCCL, Mesh.parse("dp=1"))
    assert all(collective_seconds(kind, link, 64, 64, NCCL) == 0 for kind in COLLECTIVES)


def test_steps_are_priced_with_the_tiles_they_move():
    mesh = Mesh.parse("dp=2 tp=2")
    src, dst = Layout.parse("dp:S(0) tp:P", mesh), Layout.parse("dp:R tp:R", mesh)
    steps = list(priced_steps(((8,), (8,)), 4, src, dst, NCCL))
    assert [step.collective for step, _, _ in steps] == [
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
    ]
    assert [size for _, size, _ in steps] == [128, 256]
    assert [seconds for _, _, seconds in steps] == [2 + 2 + 128 / 16, 2 + 1 + 128 / 16]
    assert redistribution_seconds(((8,), (8,)), 4, src, dst, NCCL) == sum(s for _, _, s in steps)


def test_staying_costs_nothing():
    layout = Layout(MESH, (Shard(0),))
    assert redistribution_seconds(((8,),), 4, layout, layout, NCCL) == 0


placements = st.sampled_from([REPLICATE, PARTIAL, Shard(0), Shard(1), Shard(1, 1)])
meshes = st.sampled_from([Mesh.parse("dp=4"), Mesh.parse("dp=2 tp=2"), Mesh.parse("a=2 b=1 c=4")])
sizes = st.integers(1, 40)


@given(meshes, st.data(), sizes, st.sampled_from(["nccl", "gloo"]))
def test_a_slower_link_never_makes_an_edge_cheaper(mesh, data, size, backend):
    src, dst = (Layout(mesh, tuple(data.draw(placements) for _ in mesh.axes)) for _ in range(2))
    atoms = ((size,), (3, 5))
    fast = toy_machine(4, backend, hosts=2)
    slow = toy_machine(4, backend, bandwidth=8.0, hosts=2)
    late = toy_machine(4, backend, latency=3.0, hosts=2)
    cost = redistribution_seconds(atoms, 4, src, dst, fast)
    assert cost <= redistribution_seconds(atoms, 4, src, dst, slow)
    assert cost <= redistribution_seconds(atoms, 4, src, dst, late)
    if 1 not in mesh.shape:
        assert (cost == 0) == (src == dst)


def test_messages_and_swaps_cost_a_hop_and_bytes():
    (link,) = links(NCCL, MESH)
    for kind in (Exchange.MESSAGE, Exchange.RING):
        assert collective_seconds(kind, link, 64, 64, NCCL) == 2 + 1 + 64 / 16
    per_byte = link.exchange_seconds_per_byte * 4 / 3
    for kind in (Collective.SWAP, Collective.SWAP_BACK):
        assert collective_seconds(kind, link, 48, 48, NCCL) == 2 + 1 + 48 * per_byte


def test_rows_cost_three_calls_and_their_sorting():
    (link,) = links(NCCL, MESH)
    price = step_price(Exchange.ROWS, link, NCCL)
    assert price.fixed == 3 * (2 + 3) + 12 * NCCL.device.launch_seconds
    assert price.per_larger > link.exchange_seconds_per_byte


@pytest.mark.parametrize("kind", [Collective.ALL_REDUCE, *Exchange])
def test_one_device_pays_nothing(kind):
    (link,) = links(toy_machine(1), Mesh.parse("tp=1"))
    assert step_price(kind, link, NCCL) == StepPrice(0.0)
