"""Prices of an audit: those of `sw.price`, of the nearest strategy that has one."""

from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.ir.strategy.fields import STORED_LOSSES
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.audit.auditor import Auditor
from shardwright.planner.audit.priced_as import priced_as
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.models import MeanSquare
from tests.ranks.test_offload import OFFLOAD, subject


def test_offload_is_priced_where_the_machine_has_a_link_to_its_host():
    model, batch = subject(0.0)
    graph, machine = sw.capture(model, (), batch), preset("2xcpu")
    given = Strategy.parse("dp_shard=2 ac=full" + OFFLOAD)
    assert priced_as(given, graph, machine) == (given, ())
    found = Auditor(graph, machine, "adamw", Footprints(on_cpu=True), None).price(given).plan
    expected = sw.price(graph, machine, given)
    assert found.memory.host == expected.memory.host > 0
    assert (found.step_seconds, found.peak_bytes) == (expected.step_seconds, expected.peak_bytes)
    alone = replace(machine, device=replace(machine.device, host_bytes_per_s=None))
    nearest, (replaced,) = priced_as(given, graph, alone)
    assert nearest == Strategy.parse("dp_shard=2 ac=full")
    assert (replaced.field, replaced.given, replaced.priced) == ("offload", ("activations",), ())


class Head(torch.nn.Module):
    """A projection to many classes and its cross entropy."""

    def __init__(self, classes):
        super().__init__()
        linear = torch.nn.Linear
        self.body = torch.nn.Sequential(linear(256, 512), linear(512, 256))
        self.head = linear(256, classes, bias=False)

    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.head(self.body(x)), labels)


@pytest.fixture(scope="module")
def head():
    return audited(8192)


def audited(classes):
    """The graph of a step of `Head`, two small devices, and an auditor of both."""
    batch = torch.zeros(8192, 256), torch.zeros(8192, dtype=torch.long)
    graph = sw.capture(Head(classes), batch)
    device = replace(preset("2xH100").device, memory_bytes=2**30)
    machine = replace(preset("2xH100"), device=device)
    return graph, machine, Auditor(graph, machine, "adamw", Footprints(), None)


@pytest.mark.parametrize("text", ["dp_shard=2 loss=chunked(8)", "tp=2 loss=whole"])
def test_losses_are_priced_as_they_are(head, text):
    graph, machine, auditor = head
    given = Strategy.parse(text)
    assert priced_as(given, graph, machine) == (given, ())
    found, expected = auditor.price(given).plan, sw.price(graph, machine, given)
    assert (found.step_seconds, found.peak_bytes) == (expected.step_seconds, expected.peak_bytes)
    split = auditor.price(given.but(loss="vocabulary-parallel")).plan
    assert (found.step_seconds, found.peak_bytes) != (split.step_seconds, split.peak_bytes)
    assert auditor.uniform(given).strategy.loss in (given.loss, "vocabulary-parallel")


def test_a_fused_loss_is_priced_in_chunks_as_large_as_the_hidden_states(head):
    """32 parts of 8,192 classes have as many logits as the 256 hidden features."""
    graph, machine, auditor = head
    given = Strategy.parse("dp_shard=2 loss=fused")
    nearest, (replaced,) = priced_as(given, graph, machine)
    assert nearest == given.but(loss="chunked(32)") and replaced.same
    prices = auditor.price(nearest).plan, sw.price(graph, machine, given)
    assert prices[0].step_seconds == prices[1].step_seconds
    assert prices[0].peak_bytes == prices[1].peak_bytes and prices[1].numerics.loss_chunks == 32
    whole = auditor.price(given.but(loss="whole")).plan
    assert prices[1].peak_bytes < whole.peak_bytes
    # Megatron-LM's loss in one kernel reads logits that are stored, as the price of each loss says.
    stored = given.but(loss="vocabulary-parallel-fused")
    assert priced_as(stored, graph, machine) == (stored, ())
    one, other = (sw.price(graph, machine, stored.but(loss=loss)) for loss in STORED_LOSSES[::2])
    assert (one.step_seconds, one.peak_bytes) == (other.step_seconds, other.peak_bytes)
    assert other.name.endswith("loss=vocabulary-parallel-fused")


def test_a_fused_loss_of_a_model_without_one_is_refused_by_name():
    graph = sw.capture(torch.nn.Linear(4, 4), (torch.zeros(8, 4),))
    with pytest.raises(StrategyError, match="loss=fused: the model computes no cross entropy"):
        sw.price(graph, "2xH100", "dp_shard=2 loss=fused")
    nearest, _ = priced_as(Strategy.parse("dp_shard=2 loss=fused"), graph, preset("2xH100"))
    assert nearest.loss == "vocabulary-parallel"


def test_a_loss_in_chunks_is_a_change_where_logits_are_large():
    _, _, auditor = audited(2048)  # of more there are more chunks, one traced after the other
    base = auditor.price(Strategy.parse("dp_shard=2"))
    (change,) = (one for one in auditor.changes(base, every=True) if one.change.field == "loss")
    assert change.change.after.startswith("chunked(")
    assert change.is_simulated and -base.plan.peak_bytes < change.bytes < 0
    ratio = auditor.price(change.change.strategy).plan.step_seconds / base.plan.step_seconds
    assert change.gain == pytest.approx(1 - ratio, rel=1e-9)


def test_plans_like_a_strategy_are_no_slower_and_as_compiled(head):
    _, _, auditor = head
    for text in ("dp_shard=2", "dp_shard=2 compile=regional"):
        like = Strategy.parse(text)
        found = auditor.beyond(like)
        assert found.step_seconds <= auditor.price(like).plan.step_seconds
        assert found.compiled == (like.compile != "off")
    assert auditor.beyond(Strategy.parse("pp=2 mb=2")) is None


def test_a_strategy_fits_by_its_simulated_memory_where_tables_have_more(head):
    graph, machine, auditor = head
    fast = Strategy.parse("dp_shard=2")
    slower = [fast.but(loss=f"chunked({count})") for count in (4, 8, 16, 32)]
    simulated, added = auditor.price(fast).plan.peak_bytes, auditor.unsettled(fast).peak_bytes
    assert simulated < added
    limit = (simulated + added) // 2
    assert all(auditor.unsettled(one).peak_bytes <= limit for one in slower)
    tight = Auditor(graph, machine, "adamw", Footprints(), limit)
    known = {fast, *slower}
    found = tight.best_among(slower, lambda one: one if one in known else None)
    assert found.strategy == fast and found.plan.peak_bytes == simulated


def test_only_changes_of_what_tables_leave_out_are_simulated_at_once():
    model, batch = subject(0.0)
    graph, machine = sw.capture(model, (), batch), preset("2xcpu")
    auditor = Auditor(graph, machine, "adamw", Footprints(on_cpu=True), None)
    base = auditor.price(Strategy.parse("dp_shard=2 ac=full"))
    changes = [*auditor._by_tables(base, tight=True)]
    assert {one.change.field for one in changes if one.is_simulated} == {"offload"}
    assert {one.change.field for one in changes if not one.is_simulated} >= {"zero", "recompute"}


def test_the_best_strategy_has_state_on_the_host_only_where_none_fits_else():
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
        graph = sw.capture(MeanSquare(layers), (torch.zeros(8, 1024),))
    machine, both = preset("2xH100"), ("optimizer", "parameters")
    given = Strategy.parse("dp_shard=2 offload=optimizer,parameters")
    like, replaced = priced_as(given, graph, machine)
    assert not replaced and like == given
    staged = Strategy.parse("pp=2 mb=2 offload=optimizer,parameters")
    assert priced_as(staged, graph, machine)[0].offload == ("optimizer",)
    limits = (None, ()), (2**27, ("optimizer",)), (2**25, both), (2**20, None)
    for limit, offload in limits:
        auditor = Auditor(graph, machine, "adamw", Footprints(on_cpu=False), limit)
        best = auditor.uniform(like)
        assert (best is None) is (offload is None)
        if best is not None:
            assert best.strategy.offload == best.plan.offload == offload
            plan = sw.price(graph, machine, best.strategy)
            assert plan.peak_bytes == best.plan.peak_bytes
            assert plan.step_seconds == pytest.approx(best.plan.step_seconds)
