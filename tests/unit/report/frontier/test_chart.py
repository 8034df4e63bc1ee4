import pytest

from shardwright.report.frontier.chart import Mark, chart

MIB = 2**20


def test_the_corners_are_the_extremes():
    lines = chart([Mark(0.2, 1 * MIB, "o"), Mark(0.1, 4 * MIB, "x")], 40, 8).splitlines()
    assert len(lines) == 10
    assert lines[0].startswith(" 200 ms |o") or lines[0].startswith("200 ms |o")
    assert lines[7].endswith("x")
    assert lines[-1].strip().startswith("1.00 MiB")
    assert lines[-1].endswith("4.00 MiB")


def test_a_single_point_has_a_place():
    assert "o" in chart([Mark(0.1, MIB, "o")])


def test_later_marks_cover_earlier_ones():
    drawn = chart([Mark(0.1, MIB, "a"), Mark(0.1, MIB, "o"), Mark(0.2, 2 * MIB, "b")])
    assert "a" not in drawn


def test_nothing_fits_within_the_width():
    marks = [Mark(1e-3 * i, i * MIB, "o") for i in range(1, 300)]
    assert max(map(len, chart(marks, width=60).splitlines())) <= 60


def test_no_marks_is_an_error():
    with pytest.raises(ValueError, match="at least one mark"):
        chart([])
