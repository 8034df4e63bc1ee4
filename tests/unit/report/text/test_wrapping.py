"""Lines that are too long continue below the column that they break in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.report.text.wrapping import hanging


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "memory        2 GiB of weights, 1 GiB",
            ["memory        2 GiB of", "              weights, 1 GiB"],
        ),
        (
            "              2 GiB of parameters, 1",
            ["              2 GiB of", "              parameters, 1"],
        ),
        (" 9 ms  2 GiB  FSDP 8 with TP 20", [" 9 ms  2 GiB  FSDP 8 with TP", "              20"]),
        # The last columns start in the right half.
        ("a change of it -> off   -1.1%  no", ["a change of it -> off   -1.1%", "  no"]),
        ("one sentence that is a bit too long", ["one sentence that is a bit too", "  long"]),
        ("--an_option=of-more-than-30-columns", ["--an_option=of-more-than-30-columns"]),
    ],
)
def test_a_line_continues_below_its_last_column(line, expected):
    assert hanging(line, 30) == expected


@given(
    st.lists(st.sampled_from(["a", "bcd", "efghij", " ", "  "]), max_size=40), st.integers(20, 60)
)
def test_words_stay_whole_and_in_order(parts, width):
    line = " ".join(parts).strip()
    found = hanging(line, width)
    assert " ".join(found).split() == line.split()
    assert all(len(one) <= width for one in found)
