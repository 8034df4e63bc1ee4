import io
from dataclasses import replace

from rich.console import Console

from shardwright.report.text.explain import explain
from shardwright.report.tree import axes_coloured, plan_tree
from tests.harness import plans


def drawn(plan, width=140, color=None):
    page = io.StringIO()
    console = Console(file=page, width=width, force_terminal=color is not None, color_system=color)
    console.print(plan_tree(plan))
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


def test_it_fits_a_narrow_terminal():
    assert max(map(len, drawn(plans.transformer(), 90).splitlines())) <= 90


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
