import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.report.diff.diff_text import diff_json, diff_tables, diff_text
from shardwright.report.diff.difference import difference
from tests.harness import plans

GOLDEN = Path(__file__).parents[3] / "golden" / "diff.txt"


def other_plan():
    """The transformer whose odd block is like the others and whose embedding is replicated."""
    plan = plans.transformer()
    third = plans.block(2)
    names = {op.name for op in third[0]}
    ops = tuple(op for op in plan.ops if op.name not in names)
    kept = tuple(p for p in plan.parameters if not p.name.startswith(("blocks.2", "embed")))
    transfers = tuple(t for t in plan.transfers if t.value != "embed.weight")
    extra = plans.moved("embed.weight", "head", "backward", "all_reduce dp", 16, 7.0)
    return replace(
        plan,
        step_seconds=46.13 * plans.MS,
        peak_bytes=166 * plans.MIB,
        micro_batches=2,
        ops=(*ops[:-1], *(replace(op, segment=1) for op in third[0]), ops[-1]),
        parameters=(plans.parameter("embed.weight", "dp:R tp:R", 32, 4.0), *kept, *third[1]),
        transfers=(*transfers, extra),
    )


def test_the_difference_matches_the_golden_page():
    page = diff_text(difference(plans.transformer(), other_plan()), ("a<b>.json", "b.json")) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text(), "rerun with UPDATE_GOLDEN=1 and read the diff"


def test_a_plan_does_the_same_as_itself():
    found = difference(plans.transformer(), plans.transformer())
    assert found.is_empty
    assert "The plans do the same." in diff_text(found, ("a", "b"))


def test_modules_that_do_the_same_are_left_out():
    found = difference(plans.transformer(), other_plan())
    assert [node.path for _, node in found.modules.visit()] == [
        "",
        "embed",
        "blocks.2",
        "blocks.2.up",
        "blocks.2.down",
    ]


def test_axes_that_are_only_named_otherwise_do_not_differ():
    found = difference(plans.simple(mesh="dp=2"), plans.simple(mesh="nvlink2=2"))
    assert found.modules is None
    assert found.settings == (("mesh", "dp=2", "nvlink2=2"),)
    split = difference(plans.simple(mesh="dp=2"), plans.simple(mesh="tp=2", lies="S(1)"))
    (*_, (_, node)) = split.modules.visit()
    assert node.content.texts == ("linear: dp:batch -> dp:features",)
    assert "have the names of the first plan" in diff_text(split, ("a", "b")).replace("\n", " ")


def test_repeats_that_change_alike_are_one_row():
    plan = plans.transformer()
    bias = [p for p in plan.parameters if p.name.endswith("up.bias")]
    assert len(bias) == 3
    changed = {p.name: replace(p, layout=plans.layout("dp:S(0) tp:R")) for p in bias}
    other = replace(plan, parameters=tuple(changed.get(p.name, p) for p in plan.parameters))
    nodes = [node for _, node in difference(plan, other).modules.visit()]
    assert [(n.name, n.count, n.content.texts) for n in nodes[1:]] == [
        ("blocks.0-2", 3, ()),
        ("up", 1, ("bias: tp:S(0) -> dp:S(0)",)),
    ]


def test_what_the_other_way_round_costs_is_the_opposite():
    one = difference(plans.transformer(), other_plan())
    other = difference(other_plan(), plans.transformer())
    for a, b in zip(one.modules.visit(), other.modules.visit(), strict=True):
        assert a[1].content.costs == pytest.approx([-cost for cost in b[1].content.costs])
    assert [(t.first, t.second) for t in one.totals] == [(t.second, t.first) for t in other.totals]


def test_parts_add_up_to_their_totals():
    totals = {t.name: t for t in difference(plans.transformer(), other_plan()).totals}
    for whole in ("step time", "peak memory"):
        unit = totals[whole].unit
        parts = [t for t in totals.values() if t.unit == unit and t.part]
        assert sum(t.first for t in parts) == pytest.approx(totals[whole].first)
        assert sum(t.second for t in parts) == pytest.approx(totals[whole].second)


def test_a_module_of_one_plan_only_is_shown():
    plan = plans.transformer()
    less = replace(plan, parameters=plan.parameters[1:])
    (line,) = [
        text
        for _, node in difference(plan, less).modules.visit()
        for text in node.content.texts
        if text.startswith("weight")
    ]
    assert line == "weight: dp:S(0) -> none"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_shows_the_same_lines(width):
    page = io.StringIO()
    found = difference(plans.transformer(), other_plan())
    drawn = diff_tables(found, ("[red]a", "b"), ("dp", "tp"), width)
    Console(file=page, width=width, force_terminal=True, color_system=None).print(drawn)
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any("weight: dp:S(0) -> R" in line for line in lines)
    assert "[red]a" in page.getvalue()
    (embed,) = (at for at, line in enumerate(lines) if line.split()[:1] == ["embed"])
    given, below = lines[embed].split()[1:], lines[embed + 1]
    assert ("+16.0 MiB" in " ".join(given)) == (width > 60)
    assert ("state +16.0 MiB" in below) == (width == 60)


def test_json_is_in_seconds_and_bytes():
    found = diff_json(difference(plans.transformer(), other_plan()))
    assert not found["same"]
    assert found["settings"] == {"micro-batches": {"first": "1", "second": "2"}}
    assert found["totals"]["peak_memory"] == {"first": 150 * plans.MIB, "second": 166 * plans.MIB}
    assert found["modules"][1]["module"] == "embed"
    assert found["modules"][1]["state_bytes"] == 16 * plans.MIB
