"""Intervals of times and verdicts on memory, from comparisons with held-out measurements."""

import pytest

from shardwright.report import accuracy
from shardwright.report.accuracy import MeasuredRatios, time_interval, times_text, verdict

GIB = 2**30


@pytest.fixture
def compared(monkeypatch):
    ratios = tuple(0.9 + 0.01 * i for i in range(21))  # 0.9 to 1.1
    table = {
        "kinds": {"A100": None, "L4": None},
        "times": {"A100": MeasuredRatios(40, 3, ratios)},
        "peaks": {"every GPU": MeasuredRatios(20, 1, ratios)},
    }
    monkeypatch.setattr(accuracy, "_table", lambda: table)


def test_an_interval_holds_nine_of_ten_ratios(compared):
    assert time_interval(1.0, "2x8xA100 with memory=72GiB") == (
        "90 %: 910 ms to 1090 ms, by 40 measurements of 3 sources"
    )
    assert times_text("8xA100").endswith("are -9% to +9% of predicted")


def test_a_kind_without_rows_says_so_and_a_host_says_nothing(compared):
    assert time_interval(1.0, "8xL4") == "no comparable measurement of L4"
    assert time_interval(1.0, "2xcpu") == time_interval(1.0, "my cluster") == ""


@pytest.mark.parametrize(
    "peak, says",
    [
        (50, "fits with 50.0 GiB to spare (100%)"),
        (95, "may fit, within the error of predicted peaks (5.00 GiB to spare): try it"),
        (105, "may fit, within the error of predicted peaks (5.00 GiB over): try it"),
        (130, "does not fit (30.0 GiB over, 100%)"),
    ],
)
def test_a_verdict_has_a_margin_and_doubts_what_is_within_the_error(compared, peak, says):
    assert verdict(peak * GIB, 100 * GIB, "8xA100") == says


def test_a_host_that_was_not_compared_has_a_margin_only(compared):
    assert verdict(6 * GIB, 8 * GIB, "2xcpu") == "fits with 2.00 GiB to spare"
