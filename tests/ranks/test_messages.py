"""Messages along a mesh axis, as ring attention sends them: in a batch, both ways at once."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.runtime.comm.p2p_group import AxisGroup
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks


def exchanged():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    line, me = AxisGroup(mesh), mesh.get_local_rank()
    own = [torch.full((3,), float(me)), torch.full((2,), 10.0 + me)]
    found = [torch.empty(3), torch.empty(2)]
    line.exchange([(1 - me, x) for x in own], [(1 - me, x) for x in found])()
    line.exchange([], [])()  # nothing to send is no error
    assert found[0].tolist() == [1.0 - me] * 3
    assert found[1].tolist() == [11.0 - me] * 2


def test_what_one_rank_sends_the_other_receives_in_order():
    run_ranks(2, exchanged)
