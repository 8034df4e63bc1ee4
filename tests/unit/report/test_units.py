import pytest

from shardwright.report.units import milliseconds, size


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0.00 ms"),
        (1.234e-6, "0.00 ms"),
        (0.009999, "10.0 ms"),
        (0.0456, "45.6 ms"),
        (12, "12000 ms"),
    ],
)
def test_times_have_about_three_digits(seconds, text):
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0.00 KiB"),
        (2**20 - 2**10, "1023 KiB"),
        (2**20, "1.00 MiB"),
        (2**30, "1.00 GiB"),
        (70 * 2**30, "70.0 GiB"),
    ],
)
def test_sizes_change_their_unit_at_one_of_it(count, text):
    assert size(count) == text
