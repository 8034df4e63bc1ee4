"""Mutated plan files: every command that reads one prints a result, or one clean line."""

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.cli import main
from shardwright.ir.memory import Memory, Share
from shardwright.plan_io.plan_text import plan_to_json
from tests.harness import plans

PLAN = plans.timed(plans.transformer())
SHARES = (Share("embed", "saved", PLAN.peak_bytes),)
DATA = json.loads(plan_to_json(replace(PLAN, memory=Memory.of(SHARES, rank=0, at="linear"))))
TABLES = [key for key, value in DATA.items() if isinstance(value, list) and value]

# What moves a cursor or changes the direction of a text; a line may end.
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
VALUES = st.sampled_from(
    (
        *(None, True, 0, 1, -1, 3, 2**31, 2**62, 2**70, 10**30, 1.5, -1e-9, 1e308, 5e-324),
        *(float("nan"), float("inf"), "", "x", "\x1b[2J", "a\nb", "\u202e", "\ud800", "9" * 400),
        *("dp", "dp=2 dp=2", f"dp={10**30}", "dp:S(0) tp:S(0)", "S(0)", "all_reduce zz", "1F1B"),
        *([], {}, [1], [[]], [[1, 2]], ["a"], {"a": 1}, "<script>alert(1)</script>"),
    )
)
TEXTS = st.sampled_from(("\x1b[2J", "a \u202e b", "a\x9bb", "", "a\nb", "\ud800"))
NUMBERS = st.sampled_from((-1, 0, 2**62, 2**70, 1e300, float("nan")))


def another(old):
    """Any value, or one of the type of `old`."""
    if isinstance(old, str):
        return TEXTS | VALUES
    return VALUES if isinstance(old, bool) or not isinstance(old, int | float) else NUMBERS | VALUES


@st.composite
def mutated(draw):
    """The text of a plan with one or two fields, rows or values of rows changed."""
    data = json.loads(json.dumps(DATA))
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from((*("field", "value") * 3, "gone", "row", "again", "lost")))
        tables = [name for name in TABLES if name in data]
        key = draw(st.sampled_from(list(data) if kind in ("field", "gone") else tables))
        table = data[key]
        if kind == "field":
            data[key] = draw(another(table))
        elif kind == "gone":
            del data[key]
        elif isinstance(table, list) and table:
            at = draw(st.integers(0, len(table) - 1))
            if kind == "row":
                table[at] = draw(VALUES)
            elif kind == "again":
                table.insert(at, table[at])
            elif kind == "lost":
                del table[at]
            elif isinstance(table[at], list) and table[at]:
                place = draw(st.integers(0, len(table[at]) - 1))
                table[at][place] = draw(another(table[at][place]))
    return json.dumps(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("fuzz")
    (found / "whole.json").write_text(json.dumps(DATA))
    return found


def commands(folder):
    whole, changed, out = (str(folder / name) for name in ("whole.json", "changed.json", "out"))
    yield "explain", changed
    yield "explain", changed, "--json"
    yield "diff", whole, changed
    yield "report", changed, "-o", f"{out}.html"
    yield "simulate", changed, "-o", f"{out}.json"
    yield "export", changed, "--to", "torchtitan"


def check(folder, text):
    """Run all commands; whether one took the plan."""
    (folder / "changed.json").write_text(text)
    statuses = []
    for command in commands(folder):
        result = CliRunner().invoke(main, command)
        assert isinstance(result.exception, SystemExit | None), (command, result.exception)
        assert not CONTROLS.search(result.output), command
        assert result.exit_code in (0, 2), command
        if result.exit_code == 2:
            assert result.stderr.startswith("shardwright: ") and result.stderr.count("\n") == 1
            assert len(result.stderr) < 1500 and not result.stdout
        statuses.append(result.exit_code)
    return 0 in statuses


def test_the_plan_itself_is_taken(folder):
    assert check(folder, json.dumps(DATA))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(text=mutated())
def test_a_mutated_plan_file_gives_a_result_or_one_line(folder, text):
    check(folder, text)
