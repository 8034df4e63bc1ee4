"""Parts of a tile of scores, against all pairs of a row and a column."""

import pytest
import torch

from shardwright.runtime.attention import blockwise_attention
from shardwright.runtime.attention.blockwise_attention import ScoreOptions, parts


def _pair(first, one, second, other):
    """Positions of two runs, one after the other."""
    return torch.cat([torch.arange(first, first + one), torch.arange(second, second + other)])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scores", [2**10, 2**20])  # the former: blocks of sixteen rows
def test_each_pair_that_attends_is_in_one_part(causal, scores, monkeypatch):
    """Of columns there are more than two blocks of 1,024."""
    monkeypatch.setattr(blockwise_attention, "_SCORES", scores)
    rows, columns = [(5, 40), (2200, 30)], [(0, 2230), (2230, 70)]
    row, column = _pair(*rows[0], *rows[1])[:, None], _pair(*columns[0], *columns[1])
    attends = (column <= row) if causal else torch.ones(len(row), len(column), dtype=torch.bool)
    found = torch.zeros_like(attends, dtype=torch.int)
    query = torch.empty(1, 2, 70, 4)
    for part in parts(query, rows, columns, ScoreOptions(1.0, causal, 2)):
        found[part.rows, part.columns] += 1
        assert row[part.rows][0] == part.first_row
        assert column[part.columns][0] == part.first_column
        assert part.masked or attends[part.rows, part.columns].all()
        assert part.columns.stop - part.columns.start <= 1024
    assert found.max() == 1
    assert (found[attends] == 1).all()
