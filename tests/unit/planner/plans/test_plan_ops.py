"""Recomputed operators say what they would keep, and kept ones what they keep."""

import pytest

import shardwright as sw
from shardwright.report.text.explain import explain
from shardwright.report.text.module_rows import kept, recomputed
from tests.harness.layered_graphs import BATCH, INNER, residual_layers

LAYERS = 3
FLOAT = 4
RESULT = BATCH * INNER * FLOAT // 2  # on one of two devices that split the batch


def priced(recompute):
    given = residual_layers(LAYERS)
    return sw.price(given, sw.Machine.preset("2xcpu"), f"dp_replicate=2 ac={recompute}")


def trades(plan):
    names = {parameter.name for parameter in plan.parameters}
    return recomputed(plan.ops, plan.transfers, names), kept(plan.ops)


def test_whole_layers_spare_what_only_they_save():
    """Both factors, the product's relu and its tanh; a layer's input is saved by the layer."""
    trade, _ = trades(priced("full"))
    assert trade.bytes == LAYERS * 4 * RESULT


def test_the_price_of_recomputation_is_the_time_of_a_plan_with_it_over_one_without():
    plain, again = priced("none"), priced("full")
    more = sum(op.seconds for op in again.ops) - sum(op.seconds for op in plain.ops)
    assert trades(again)[0].seconds == pytest.approx(more)
    assert trades(plain)[0] is None


def test_a_kept_operator_shows_what_it_keeps_and_the_time_it_does_not_take():
    whole, but_products = (trades(priced(one)) for one in ("full", "ops(mm/2)"))
    once = but_products[1]
    assert once.bytes > 0
    assert once.seconds == pytest.approx(whole[0].seconds - but_products[0].seconds)


def test_explain_shows_both_for_each_layer():
    page = " ".join(explain(priced("full")).split())
    size = f"{4 * RESULT / 2**20:,.2f} MiB less for "
    assert page.count(f"recomputed: {size}") == LAYERS
    assert f"{LAYERS * 4 * RESULT / 2**20:,.2f} MiB less for " in page
