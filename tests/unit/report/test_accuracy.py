"""Intervals of times and verdicts on memory, from comparisons with held-out measurements."""

from dataclasses import replace

import pytest

from shardwright.ir.options.numerics import Numerics
from shardwright.report import accuracy
from shardwright.report.accuracy import (
    MeasuredRatios,
    MeasuredUnder,
    time_interval,
    times_text,
    verdict,
)
from tests.harness import plans

GIB = 2**30
NARROW = Numerics(fp8="torchao:tensorwise")
RATIOS = MeasuredRatios(40, 3, tuple(0.9 + 0.01 * i for i in range(21)))  # 0.9 to 1.1
UNDER = MeasuredUnder.of(
    "A100", experts=False, bits=16, compiled=False, pipeline=False, seconds=1.0
)


@pytest.fixture
def compared(monkeypatch):
    table = accuracy._Accuracy(("A100", "L4"), {UNDER: RATIOS}, RATIOS)
    monkeypatch.setattr(accuracy, "_table", lambda: table)


def plan(machine="2x8xA100 with memory=72GiB", seconds=1.0, gib=50, kind="linear"):
    """A transformer in bfloat16; half of its time is that of an operator of this `kind`."""
    one, *_ = plans.transformer().ops
    ops = [replace(one, target=f"aten.{what}.default") for what in (kind, "softmax")]
    return replace(
        plans.transformer(),
        ops=tuple(ops),
        machine=machine,
        step_seconds=seconds,
        peak_bytes=gib * GIB,
        dtype="bfloat16",
        micro_batches=1,
    )


def test_an_interval_holds_nine_of_ten_ratios(compared):
    assert time_interval(plan()) == "90 %: 910 ms to 1090 ms, by 40 measurements of 3 sources"
    (sentence,) = times_text("8xA100")
    assert sentence.startswith("step times of dense transformers, products in 16 bits, eager")
    assert sentence.endswith("are -9% to +9% of predicted")


def test_a_kind_without_rows_says_so_and_a_host_says_nothing(compared):
    assert time_interval(plan("8xL4")) == "no comparable measurement of L4"
    assert times_text("8xL4") == ["step times: no comparable measurement of L4"]
    assert time_interval(plan("2xcpu")) == time_interval(plan("my cluster")) == ""


@pytest.mark.parametrize(
    "other, what",
    [
        (plan(kind="experts"), "mixtures of experts"),
        (plan(kind="convolution"), "models without attention"),
        (plans.simple(), "models without attention"),
        (replace(plan(), dtype="float32"), "products in 32 bits"),
        (replace(plan(), dtype="tf32"), "products in 32 bits"),
        (replace(plan(), dtype=""), "products of an unknown dtype"),
        (replace(plan(), numerics=NARROW), "products in 8 bits"),
        (replace(plan(), compiled=True), "compiled layers"),
        (replace(plan(), schedule="1F1B"), "pipelines"),
        (replace(plan(), micro_batches=8, step_seconds=0.4), "micro-batches of 20 to 100 ms"),
        (plan(seconds=0.001), "micro-batches of under 20 ms"),
    ],
)
def test_what_was_not_measured_is_named(compared, other, what):
    other = replace(other, machine="8xA100")
    assert time_interval(other) == f"no comparable measurement of {what} on A100"


@pytest.mark.parametrize(
    "peak, says",
    [
        (50, "fits with 50.0 GiB to spare (100% of comparable measured peaks would)"),
        (95, "may fit (5.00 GiB to spare, within the error of predicted peaks)"),
        (105, "may fit (5.00 GiB over, within the error of predicted peaks)"),
        (130, "does not fit (30.0 GiB over; 100% of comparable measured peaks would not)"),
    ],
)
def test_a_verdict_has_a_margin_and_doubts_what_is_within_the_error(compared, peak, says):
    assert verdict(plan("8xA100", gib=peak), 100 * GIB) == says


def test_peaks_unlike_those_measured_have_no_share_and_are_doubted_as_well(compared):
    none = "fits with 50.0 GiB to spare (no comparable peak was measured)"
    assert verdict(plan("8xA100", kind="experts"), 100 * GIB) == none
    assert verdict(replace(plan("8xA100"), dtype="float32"), 100 * GIB) == none
    assert verdict(plan("8xA100", kind="experts", gib=95), 100 * GIB).startswith("may fit")
    small = replace(plan("8xA100"), peak_bytes=GIB // 2)
    assert verdict(small, GIB) == "fits with 512 MiB to spare (no comparable peak was measured)"


def test_a_host_that_was_not_compared_has_a_margin_only(compared):
    assert verdict(plan("2xcpu", gib=6), 8 * GIB) == "fits with 2.00 GiB to spare"
