"""Of a finished plan every bucket pays for its messages as they are, full or not."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.layout import Mesh, Seconds
from shardwright.machine.measurement import Measured
from shardwright.planner.tables.memory import bucket_sizes
from shardwright.simulate.time.comm_buckets import flights_of, sums_of

LAUNCH = 1e-3
MEASURED = Measured(datetime(2026, 1, 31, tzinfo=UTC), 0.0, ())


class Net(nn.Module):
    """Two matrices of more than 1 MiB, and small ones of which a bucket has several."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(600, 600) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(600, 600 // n) for n in (4, 6, 10))

    def forward(self, x):
        for layer in self.wide:
            x = torch.tanh(layer(x))
        return sum(layer(x).square().mean() for layer in self.narrow)


def machine(overlap, measured=None):
    """On which nothing takes time but to begin a message."""
    cpu = sw.Machine.preset("2xcpu")
    (level,) = cpu.levels
    fast = replace(level, bytes_per_s=1e18, latency_seconds=Seconds(0.0), gather_bytes_per_s=1e18)
    device = replace(cpu.device, bytes_per_s=1e18, launch_seconds=Seconds(0.0))
    return replace(
        cpu,
        levels=(fast,),
        device=device,
        overlap=overlap,
        collective_launch_seconds=Seconds(LAUNCH),
        measured=measured,
    )


def plans(overlap, measured=None):
    torch.manual_seed(0)
    graph = sw.capture(Net(), (), {"x": torch.randn(8, 600)})
    found = sw.search(graph, machine(overlap, measured), meshes=[Mesh.parse("dp=2")])
    return {plan.name: plan for plan in found.baselines}, bucket_sizes(graph).sums


def spent(message):
    return sum(t.seconds for t in message)


@pytest.mark.parametrize("how", [(0.5,), (0.0, MEASURED)])
def test_every_message_of_a_bucket_has_its_launch(how):
    """Where something hides, and on a measured machine also where nothing does."""
    known, limit = plans(*how)
    fills = []
    for bucket in sums_of(known["data parallel"]):
        fills.append(sum(min(1.0, t.bytes / limit) for t in bucket.sums))
        # The last gradient of a bucket may make it more than full; a bound must not be above that.
        assert spent(bucket.sums) == pytest.approx(max(1.0, fills[-1]) * LAUNCH, rel=1e-6)
    assert min(fills) < 1 <= max(fills)
    flights = flights_of(known["fully sharded"])
    alone = [[t.bytes >= 2**20 for t in flight.forward] for flight in flights]
    assert any(any(large) for large in alone) and any(len(large) > 1 for large in alone)
    for large, flight in zip(alone, flights, strict=True):
        messages = sum(large) + (not all(large))
        assert spent(flight.forward) == pytest.approx(messages * LAUNCH, rel=1e-6)
        assert spent(flight.backward) == pytest.approx(messages * LAUNCH, rel=1e-6)


def test_tables_have_a_bucket_pay_what_it_fills():
    known, _ = plans(overlap=0.0)
    small = [t for f in flights_of(known["fully sharded"]) for t in f.forward if t.bytes < 2**20]
    assert 0 < spent(small) < LAUNCH
    for plan in known.values():
        parts = (plan.ops, plan.transfers, plan.parameters)
        total = sum(one.seconds for part in parts for one in part)
        assert plan.step_seconds == pytest.approx(total, rel=1e-9)
