"""Which results of tiles differ from those of the whole."""

import torch

from shardwright.tracing.discovery.trial import TrialTiles
from shardwright.tracing.discovery.user_rule_check import _results_differ


def tiles(*results):
    """Results as (whole, first tile, second tile)."""
    whole, first, second = (list(one) for one in zip(*results, strict=True))
    return TrialTiles({}, whole, ({}, {}), (first, second), 4, (2, 2))


FLAG = (torch.tensor(True), torch.tensor(True), torch.tensor(False))  # has no sum of parts
SUM = (torch.tensor(5.0), torch.tensor(2.0), torch.tensor(3.0))
WRONG = (torch.tensor(7.0), torch.tensor(2.0), torch.tensor(3.0))


def test_every_result_is_compared_also_behind_a_boolean_one():
    assert not _results_differ(tiles(FLAG, SUM), (None, None))
    assert _results_differ(tiles(FLAG, WRONG), (None, None))
    assert _results_differ(tiles(SUM, WRONG), (None, None))


def test_parts_are_put_together_along_the_dimension_of_the_rule():
    x = torch.arange(4.0)
    assert not _results_differ(tiles((x, x[:2], x[2:])), (0,))
    assert _results_differ(tiles((x, x[2:], x[:2])), (0,))
    assert _results_differ(tiles((x, x[:2], x[2:])), (None,))
    assert _results_differ(tiles((x, x[:2], x[:3])), (None,))
