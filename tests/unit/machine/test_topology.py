import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import stage_mesh
from shardwright.machine.presets import preset
from shardwright.machine.topology import contention_of, crossed_levels, links
from tests.harness.small_graphs import toy_machine

# Two hosts of four: links of 16 B/s and 1 s, a network share of 2 B/s and 10 s.
HOSTS = toy_machine(devices=4, hosts=2)


def test_the_inner_axis_stays_inside_a_host():
    dp, tp = links(HOSTS, Mesh.parse("dp=2 tp=4"))
    assert (tp.ranks, tp.bytes_per_s, tp.lap_seconds) == (4, 16.0, 3.0)
    # Four groups cross between the hosts at once, each with one device's share.
    assert (dp.ranks, dp.bytes_per_s, dp.lap_seconds) == (2, 2.0, 10.0)


def test_one_group_has_the_network_of_all_its_members():
    (link,) = links(HOSTS, Mesh.parse("dp=8"))
    assert link.bytes_per_s == 4 * 2.0
    assert link.lap_seconds == 6 * 1.0 + 10.0  # three hops in each host, one between


def test_groups_that_cross_the_same_network_share_it():
    dp, tp = links(HOSTS, Mesh.parse("dp=4 tp=2"))
    # Two groups, each with ranks {0, 2} and {4, 6} of the hosts: half of 8 B/s for each.
    assert (dp.bytes_per_s, dp.lap_seconds) == (4.0, 2 * 1.0 + 10.0)
    assert (tp.bytes_per_s, tp.lap_seconds) == (16.0, 1.0)


def test_an_exchange_is_bound_by_each_devices_own_network():
    inner = links(HOSTS, Mesh.parse("dp=2 tp=4"))[1]
    assert inner.exchange_seconds_per_byte == 3 / 4 / 16.0
    (whole,) = links(HOSTS, Mesh.parse("dp=8"))
    assert (
        whole.exchange_seconds_per_byte == 4 / 8 / 2.0
    )  # half of each tile goes to the other host


def test_an_axis_of_one_device_needs_no_link():
    one, tp = links(HOSTS, Mesh.parse("pp=1 tp=8"))
    assert (one.ranks, one.lap_seconds, one.exchange_seconds_per_byte) == (1, 0.0, 0.0)
    assert tp.ranks == 8


def test_a_mesh_may_use_the_first_devices_only():
    (link,) = links(HOSTS, Mesh.parse("tp=4"))
    assert (link.bytes_per_s, link.lap_seconds) == (16.0, 3.0)
    assert links(HOSTS, Mesh(())) == ()


def test_a_mesh_beyond_the_machine_is_refused():
    with pytest.raises(ValueError, match=r"mesh dp=16 needs 16 devices, machine toy has 8; choose"):
        links(HOSTS, Mesh.parse("dp=16"))


def test_big_machines_are_no_trouble():
    machine = preset("64x8xH100")
    dp, tp = links(machine, Mesh.parse("dp=64 tp=8"))
    assert tp.bytes_per_s == machine.levels[0].bytes_per_s
    assert dp.bytes_per_s == machine.levels[1].bytes_per_s


def test_long_rings_are_counted_once_around():
    machine = preset("2048x8xH100")
    hosts = machine.levels[1]
    dp, tp = links(machine, Mesh.parse("dp=8192 tp=2"))
    # Two rings cross each host and share the network of its eight devices.
    assert dp.bytes_per_s == 4 * hosts.bytes_per_s
    inside = 3 * 2048 * machine.levels[0].latency_seconds
    assert dp.lap_seconds == pytest.approx(inside + 2047 * hosts.latency_seconds)
    away = 1 - 4 / 8192  # of each tile: all but the four in the same host
    assert dp.exchange_seconds_per_byte == pytest.approx(away / hosts.bytes_per_s)
    assert tp.ranks == 2


def test_stages_near_each_other_send_inside_a_host_and_replicas_across():
    """The pipeline inside of data parallelism: a stage has two ranks of each host."""
    mesh = Mesh.parse("dp=2 pp=2 tp=2")
    dp, pp, tp = links(HOSTS, mesh)
    assert (pp.bytes_per_s, pp.lap_seconds) == (16.0, 1.0)
    stage = stage_mesh(mesh)
    assert links(HOSTS, stage) == (dp, tp)
    # Four groups of both stages cross between the hosts, each with one device's share.
    assert (dp.bytes_per_s, dp.lap_seconds) == (2.0, 10.0)
    assert crossed_levels(HOSTS, stage) == ({1}, {0})
    outermost = stage_mesh(Mesh.parse("pp=2 dp=2 tp=2"))
    assert crossed_levels(HOSTS, outermost) == ({0}, {0})
    assert contention_of(HOSTS, stage, "dp", "tp") == 0.0
    assert contention_of(HOSTS, outermost, "dp", "tp") == HOSTS.contention > 0


def test_stages_of_more_devices_than_a_machine_are_refused():
    stage = stage_mesh(Mesh.parse("dp=4 pp=2 tp=2"))
    with pytest.raises(ValueError, match=r"mesh dp=4 pp=2 tp=2 needs 16 devices"):
        links(HOSTS, stage)
