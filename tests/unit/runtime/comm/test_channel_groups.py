"""Groups of channels of one rank of 1,024 fake ones: how many are made, of whom, and when."""

import copy
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.program.step.channels import between, gathers, link
from shardwright.runtime.backend import registry
from shardwright.runtime.backend.base import Backend
from shardwright.runtime.comm import channel_groups
from shardwright.runtime.comm.channel_groups import ChannelGroups
from tests.harness.fake_rank import SPEC

WORLD, RANK = 1024, 517  # (1, 0, 5) of the mesh
CPU = torch.device("cpu")


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setitem(registry._KNOWN, "fake", Backend(SPEC))
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield init_device_mesh("cpu", (4, 32, 8), mesh_dim_names=("pp", "dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture
def asked(monkeypatch):
    """The ranks of each call that makes a group; messages between two are noted, too."""
    found, make = [], dist.new_group
    module = dist.distributed_c10d
    monkeypatch.setattr(
        module, "new_group", lambda ranks, **given: found.append(ranks) or make(ranks, **given)
    )
    monkeypatch.setattr(
        channel_groups, "_connect", lambda group, _: found.append(f"message {group.size()}")
    )
    return found


def test_channels_of_axes_have_the_groups_of_the_mesh(mesh, asked):
    groups = ChannelGroups(mesh, CPU)
    for axis, size in (("pp", 4), ("dp", 32), ("tp", 8)):
        assert groups[axis] is mesh[axis].get_group() and groups[axis].size() == size
    groups.make(("dp", "tp"))
    assert asked == []


def test_another_channel_of_an_axis_has_the_same_ranks_and_is_made_once(mesh, asked):
    groups = ChannelGroups(mesh, CPU)
    apart = groups[gathers("dp")]
    assert apart is not groups["dp"] and apart is groups[gathers("dp")]
    ranks = dist.get_process_group_ranks
    assert ranks(apart) == ranks(groups["dp"])
    assert len(asked) == WORLD // 32 and sorted(chain(*asked)) == list(range(WORLD))
    assert copy.deepcopy(groups) is groups


def test_channels_between_pipeline_groups_are_made_on_all_ranks_alike(mesh, asked):
    groups = ChannelGroups(mesh, CPU)
    assert RANK // 256 == 2
    groups.make((link(1, 2), link(2, 1), link(0, 1), between((0, 2, 3))))
    rows = [one for one in asked if isinstance(one, list)]
    assert len(rows) == 4 * 256 and {len(row) for row in rows} == {2, 3}
    there, back, apart, shared = (rows[i * 256 + RANK % 256] for i in range(4))
    assert there == back == [RANK - 256, RANK] and RANK not in apart
    assert dist.get_process_group_ranks(groups[link(1, 2)]) == there
    assert groups[link(1, 2)] is not groups[link(2, 1)]
    assert dist.get_process_group_ranks(groups[between((0, 2, 3))]) == shared
    # Two send each other a first message; a sum of three needs none.
    assert [one for one in asked if isinstance(one, str)] == ["message 2"] * 2
    asked.clear()
    groups.make((link(0, 1), link(1, 2)))
    assert asked == [] and link(0, 1) not in groups
    with pytest.raises(AssertionError, match="no member of pp:0>1"):
        groups[link(0, 1)]


def test_ranks_agree_on_channels_that_others_name(mesh, asked, monkeypatch):
    def others(found, mine):
        found[:] = [mine, (gathers("tp"), "dp")] * (len(found) // 2)

    monkeypatch.setattr(dist, "all_gather_object", others)
    groups = ChannelGroups(mesh, CPU)
    groups.agree(["dp", gathers("dp")])
    assert {gathers("dp"), gathers("tp")} < set(groups)
    assert [len(ranks) for ranks in asked] == [32] * 32 + [8] * 128


def test_one_device_has_no_channel():
    assert ChannelGroups(None, CPU) == {}
