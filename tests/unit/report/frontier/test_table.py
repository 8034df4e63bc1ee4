import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.ir.frontier import Frontier
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.report.frontier.table import (
    PLAIN_WIDTH,
    SETTLED,
    frontier_table,
    frontier_text,
    plain_text,
)
from shardwright.report.summary import LEGEND
from tests.harness import plans
from tests.harness.plan_simulations import FunctionSimulation

GOLDEN = Path(__file__).parents[3] / "golden" / "frontier.txt"


def test_plain_text_matches_the_golden_table():
    frontier = plans.frontier()
    text = frontier_text(frontier, frontier[0]) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "rerun with UPDATE_GOLDEN=1 and read the diff"
    assert max(map(len, text.splitlines())) <= PLAIN_WIDTH


def test_the_terminal_table_holds_the_same_rows():
    frontier = plans.frontier()
    drawn = plain_text(frontier_table(frontier, frontier[0]), PLAIN_WIDTH)
    for word in ("0*", "80.0 ms", "data parallel", "fully sharded"):
        assert word in drawn


def test_a_long_frontier_is_thinned_but_keeps_ends_and_choice():
    many = Frontier(tuple(plans.simple(ms=100 + i, mib=1000 - i) for i in range(60)))
    text = frontier_text(many, many[17])
    first_words = [line.split()[0] for line in text.splitlines()[1:]]
    assert "0" in first_words
    assert "17*" in first_words
    assert "59" in first_words
    assert "47 more" in text
    assert len(first_words) == 14


@pytest.mark.parametrize("ms, place", [(70, 0), (110, 2), (170, 3)])
def test_a_chosen_plan_off_the_frontier_has_a_row_of_its_own(ms, place):
    text = frontier_text(plans.frontier(), plans.simple(ms=ms, mib=240))
    rows = text.splitlines()[1:5]
    assert [row.split()[0] for row in rows].index("*") == place
    assert f"{ms:.1f} ms" in rows[place].replace("  ", " ") or f"{ms} ms" in rows[place]


def test_a_baseline_that_breaks_a_constraint_says_which():
    frontier = replace(plans.frontier(), broken={"fully sharded": ("cap dp=1", "mesh tp=2")})
    *_, data_parallel, fully_sharded = frontier_text(frontier).splitlines()
    assert data_parallel.endswith("data parallel (dp=2)")
    assert fully_sharded.endswith("fully sharded (dp=2), breaks cap dp=1; mesh tp=2")


def test_shares_are_explained_where_there_are_some():
    assert LEGEND not in frontier_text(plans.frontier())
    assert frontier_text(Frontier((plans.transformer(),))).endswith(LEGEND)


def test_memory_that_is_settled_is_told_from_what_adds_up():
    settled = plans.frontier()
    assert SETTLED not in frontier_text(settled, settled[1])
    text = frontier_text(
        SearchedFrontier(settled.plans, simulation=FunctionSimulation()), settled[1]
    )
    assert text.endswith(SETTLED)
    assert "<= 300 MiB" in text and "~ " in text
    assert len(SETTLED) <= PLAIN_WIDTH
