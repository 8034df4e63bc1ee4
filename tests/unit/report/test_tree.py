import io
from dataclasses import replace

import pytest
from rich.console import Console

from shardwright.report.text.explain import explain
from shardwright.report.tree import PlanTree, axes_coloured
from tests.harness import plans


def drawn(plan, width=140, color=None):
    page = io.StringIO()
    console = Console(file=page, width=width, force_terminal=color is not None, color_system=color)
    console.print(PlanTree(plan))
    return page.getvalue()


def test_the_tree_holds_what_explain_says():
    plan = plans.transformer()
    tree = " ".join(drawn(plan, 200).split())
    assert "├ blocks.0-1 8.12 24.00 - 8.10 1.10" in tree
    for words in explain(plan).partition("\n\n")[2].split("\n\n")[0].split():
        assert words in tree or words in ("0.00", "-")


def test_branches_end_at_the_last_child():
    tree = drawn(plans.transformer()).splitlines()
    (last,) = [line for line in tree if "(not attributed)" in line]
    assert last.strip().startswith("└ (not attributed)")
    (first,) = [line for line in tree if "blocks.0-1" in line]
    assert first.strip().startswith("├ blocks.0-1")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_fits_the_terminal(width):
    lines = drawn(plans.transformer(), width).splitlines()
    assert max(map(len, lines)) <= width
    (block,) = (at for at, line in enumerate(lines) if "blocks.0-1" in line)
    numbers = lines[block].partition("blocks.0-1")[2].split()
    if width == 60:  # numbers have names below the module
        assert not numbers and "state 8.12 MiB, saved 24.00 MiB" in lines[block + 1]
    else:  # and elsewhere one column for all modules
        assert numbers[0] == "8.12"
        ends = {line.index("8.12") + 4 for line in lines if "blocks.0-1" in line}
        (heading,) = (line for line in lines if line.startswith("module"))
        assert ends == {heading.index("state") + 5}


def test_every_axis_has_its_colour():
    text = axes_coloured("linear dp:batch tp:S(0); all_reduce tp: x, adp:y", ["dp", "tp"])
    assert [(text.plain[s.start : s.end], s.style) for s in text.spans] == [
        ("dp:batch", "cyan"),
        ("tp:S(0)", "magenta"),
        ("tp", "magenta"),
    ]


def test_names_that_look_like_markup_stay_text():
    plan = plans.transformer()
    odd = replace(plan.ops[0], source=replace(plan.ops[0].source, module="[red]embed[/red]"))
    page = drawn(replace(plan, ops=(odd, *plan.ops[1:]), name="[bold]x"), color="truecolor")
    assert "[red]embed[/red]" in page
    assert "[bold]x" in page
