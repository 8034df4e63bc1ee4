"""Probes of collectives: what they allocate, and what is computed beside them."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.machine.gpus import GPUS
from shardwright.machine.presets import preset
from shardwright.profile import link_probes
from tests.harness.fake_rank import fake_world
from tests.harness.ranks import run_ranks


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made, and the shapes of products."""

    bytes = 0

    def __init__(self):
        super().__init__()
        self.products = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            self.products.add(tuple(found.shape))
        if isinstance(found, torch.Tensor):
            self.bytes = max(self.bytes, found.untyped_storage().nbytes())
        return found


class Stopwatch:
    """Runs each probe once."""

    device = torch.device("meta")

    def __init__(self):
        self.works = {}

    def once(self, run):
        run()
        return 1e-3

    def add(self, kind, work, run, times=1, after=None):
        self.works.setdefault(kind, set()).add(work)
        run()


def probed():
    stopwatch = Stopwatch()
    on_a_device = mock.patch.object(link_probes, "KIB", link_probes.KIB + link_probes.KIB_ON_GPU)
    same = mock.patch.object(link_probes, "_broadcast_from_rank_0", lambda number, _: number)
    with fake_world(517, 4096), Largest() as largest, on_a_device, same:
        mesh = init_device_mesh("meta", (512, 8), mesh_dim_names=("network", "host"))
        link_probes.add_all(stopwatch, {name: mesh[name] for name in ("host", "network")})
    return largest.bytes, stopwatch.works, largest.products


def test_gathered_buffers_do_not_grow_with_the_hosts():
    ((largest, works, products),) = run_ranks(1, probed)
    assert largest == 8 * 64 * 2**20
    assert max(works["host all_gather"]) == 64 * 2**20
    assert max(works["network all_gather"]) == 2**20
    assert max(works["network all_reduce"]) == 256 * 2**20
    assert works["overlap all_gather both"] == {2**30 // (4 * 512)}
    assert works["overlap all_reduce both"] == {64 * 2**20}
    assert products == {(4096, 4096)}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.kind)
def test_products_beside_collectives_on_a_gpu_are_not_paced_by_the_host(gpu):
    device = preset(f"8x{gpu.kind}").device
    _, side = link_probes.BESIDE_ON_GPU
    assert 2 * side**3 / device.peak_flop_per_s("float32") > 10 * device.issue_seconds
