"""Rows of logits are cast in parts that cover them once."""

import pytest

from shardwright.rules.operators.half_logits import part_elements, row_parts


@pytest.mark.parametrize("rows, classes", [(0, 7), (1, 2**23), (5, 2**21), (2**15, 128256)])
def test_parts_cover_all_rows_and_none_is_larger_than_is_said(rows, classes):
    parts = list(row_parts(rows, classes))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    sizes = [(part.stop - part.start) * classes for part in parts]
    assert max(sizes, default=0) == part_elements(rows, classes) <= max(classes, 2**22)
