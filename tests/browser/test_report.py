"""The report in a browser, as a person uses it: click, hover, filter, keys, dark, print."""

import re
from dataclasses import replace

import pytest

from shardwright.ir.layout import Bytes, Mesh
from shardwright.ir.memory import Memory, Moment, Share
from shardwright.report.diff.diff_text import diff_text
from shardwright.report.diff.difference import difference
from shardwright.report.page import MeasuredRun, Shown, StepBars, page
from shardwright.report.timelines.chrome import simulated
from tests.harness import plans

ODD = "<img src=x onerror=alert(1)>&<b>wide</b>"


def shown():
    """A searched plan of an odd name, two more for four devices, a baseline for two."""
    first = plans.transformer()
    module = replace(first.ops[0], source=replace(first.ops[0].source, module=ODD))
    first = replace(first, ops=(module, *first.ops[1:]))
    second = replace(plans.transformer(), step_seconds=0.05, peak_bytes=120 * plans.MIB)
    with_rivals = plans.frontier().with_rivals(plans.frontier()[0])
    moments = [Moment(ODD, *(Bytes(n * plans.MIB) for n in (0, at, 2, 1, 0))) for at in range(9)]
    held = Memory.of([Share("", "parameters", Bytes(7))], rank=0, at="linear, forward")
    third = replace(with_rivals, mesh=Mesh.parse("dp=2"), memory=replace(held, curve=(*moments,)))
    baseline = plans.simple("data parallel", 90, 320, comm_ms=15)
    return [
        Shown(ODD, first, simulated(plans.timed(first).timeline)),
        Shown("second", second),
        Shown("third", third),
        Shown("base", baseline),
    ]


@pytest.fixture(scope="module")
def text():
    bars = ((0, "linear", "compute", 0.0, 900.0, ODD), (1, "all_reduce", "comm", 400.0, 600.0, ""))
    return page(
        shown(),
        f"Plans of {ODD}",
        200 * plans.MIB,
        [
            MeasuredRun("run", 0.1, 0.125, 150 * plans.MIB, 200 * plans.MIB),
            MeasuredRun("other", 0.1, 0.1),
        ],
        StepBars("trace.json", ("rank 0 compute", "rank 0 comm"), bars),
    )


@pytest.fixture(scope="module")
def light(open_page, text):
    return open_page(text, viewport={"width": 1200, "height": 1000}, color_scheme="light")


@pytest.fixture
def tab(light):
    """The page with its first plan shown, everything else as each test leaves it at its end."""
    light.mouse.move(0, 0)
    light.click("#plans tr[data-index='0']")
    light.evaluate("scrollTo(0, 0)")
    return light


def position(tab, chart, index):
    """Where on the screen the point of plan `index` is."""
    return tab.evaluate(
        """([id, index]) => {
          const chart = document.getElementById(id), box = chart.getBoundingClientRect();
          for (const trace of chart._fullData) {
            const at = (trace.customdata || []).indexOf(index);
            if (at < 0) continue;
            const { xaxis, yaxis, _size } = chart._fullLayout;
            const x = xaxis.d2p(trace.x[at]), y = yaxis.d2p(trace.y[at]);
            return [box.left + _size.l + x, box.top + _size.t + y];
          }
        }""",
        [chart, index],
    )


def hovered(tab):
    tab.wait_for_selector(".hoverlayer .hovertext")
    return tab.text_content(".hoverlayer")


def rows(tab, table="tree"):
    """The first words of every row that is to be seen; in one call, as deep models have many."""
    return tab.eval_on_selector_all(
        f"#{table} tbody tr",
        "rows => rows.filter(row => row.checkVisibility())"
        ".map(row => row.innerText.split('\\n')[0].split('\\t')[0])",
    )


def test_a_click_on_a_point_shows_that_plan(tab):
    assert tab.inner_text("#plan-title").startswith(ODD)
    tab.mouse.click(*position(tab, "frontier", 1))
    tab.wait_for_function("document.getElementById('plan-title').textContent.startsWith('second')")
    assert tab.is_checked("#plans tr[data-index='1'] input")
    assert "50.0 ms" in tab.inner_text("#parts")


def test_hovering_tells_what_a_point_is(tab):
    tab.mouse.move(*position(tab, "frontier", 1))
    words = hovered(tab)
    assert "second" in words
    assert "50.0 ms a step" in words


def test_names_with_markup_stay_text(tab):
    assert tab.inner_text("h1") == f"Plans of {ODD}"
    assert tab.title() == f"Plans of {ODD}"
    assert tab.query_selector("img") is None
    tab.mouse.move(*position(tab, "frontier", 0))
    assert "<b>wide</b>" in hovered(tab)
    assert any("<b>wide</b>" in row for row in rows(tab))


def traces(tab):
    """Symbols and indices of plans by the name of a mark in the legend."""
    found = tab.evaluate(
        "document.getElementById('frontier')._fullData"
        ".map(t => [t.name, (t.marker || t.line).symbol, t.customdata || []])"
    )
    return {name: (symbol, [i for i in plans if i >= 0]) for name, symbol, plans in found}


def test_the_page_opens_with_the_verdict_of_the_plan(tab):
    tab.click("#plans tr[data-index='1']")
    assert tab.inner_text("#fit") == (
        "fits with 80.0 MiB to spare on 4 devices of 4xcpu: 50.0 ms a step, 120 MiB per device"
        " of 200 MiB"
    )
    assert tab.inner_text("#answer dt:first-of-type") == "speed"
    assert tab.query_selector("#verdict.over") is None
    tab.click("#plans tr[data-index='3']")
    assert tab.inner_text("#fit").startswith("does not fit")
    assert tab.query_selector("#verdict.over") is not None


def test_a_plan_that_may_fit_is_marked_as_doubtful(open_page):
    tight = replace(plans.simple(mesh="dp=8"), machine="8xH100", peak_bytes=77 * 2**30)
    tab = open_page(page([Shown("tight", tight)], "A plan for 8xH100", 78 * 2**30))
    assert tab.inner_text("#fit").startswith("may fit (1.00 GiB to spare, within the error")
    assert tab.query_selector("#verdict.doubt:not(.over)") is not None
    assert tab.inner_text("#verdict-title") == "tight"
    assert tab.inner_text("#subtitle").startswith("a step on args.0 ")


def test_plans_that_do_not_fit_are_drawn_on_demand(tab):
    assert "2 devices, baselines" not in traces(tab)
    tab.check("#outliers input")
    assert traces(tab)["2 devices, baselines"] == ("diamond", [3])
    tab.uncheck("#outliers input")
    assert "2 devices, baselines" not in traces(tab)
    tab.click("#plans tr[data-index='3']")  # the plan on the page has its mark in any case
    assert traces(tab)["2 devices, baselines"] == ("diamond", [3])


def test_no_line_joins_plans_of_different_parallelism(open_page):
    same = [plans.simple("searched", 100 - i, 100 + i) for i in range(2)]
    other = plans.simple("searched", 90, 110, lies="S(1)")
    tab = open_page(page([Shown(f"{i}", plan) for i, plan in enumerate([*same, other])], "lines"))
    (drawn,) = tab.evaluate(
        "document.getElementById('frontier')._fullData.filter(t => t.name == '2 devices')"
        ".map(t => t.customdata)"
    )
    assert drawn == [0, 1, -1, 2]


def test_baselines_rivals_and_the_limit_are_on_the_chart(tab):
    tab.check("#outliers input")
    named = {name: symbol for name, (symbol, _) in traces(tab).items()}
    tab.uncheck("#outliers input")
    assert named["4 devices"] == "circle"
    assert named["2 devices, baselines"] == "diamond"
    assert named["2 devices, not saved"] == "circle-open"
    assert named["2 devices, baselines, not saved"] == "diamond-open"
    assert {"the plan shown", "memory limit"} <= named.keys()
    (shape,) = tab.evaluate("document.getElementById('frontier')._fullLayout.shapes.map(s => s.x0)")
    assert shape == 200, "MiB, as no plan takes a GiB"
    over = tab.query_selector_all("#plans tr.over")
    assert [row.get_attribute("data-index") for row in over] == ["2", "3"]


def test_device_counts_are_filtered(tab):
    tab.uncheck("#devices input[value='4']")
    names = tab.evaluate("document.getElementById('frontier')._fullData.map(t => t.name)")
    assert not any(name.startswith("4") for name in names)
    assert len(rows(tab, "plans")) == 2
    tab.check("#devices input[value='4']")
    assert len(rows(tab, "plans")) == 4


def test_the_tree_is_filtered_by_name_layout_and_collective(tab):
    tab.fill("#filter", "reduce_scatter")
    assert rows(tab) == ["▾(model)"]
    tab.fill("#filter", "blocks.2.down")
    assert rows(tab) == ["▾(model)", "▾blocks.2", "down"]
    tab.fill("#filter", "no such thing")
    assert rows(tab) == []
    tab.fill("#filter", "")
    assert len(rows(tab)) > 3


def test_the_tree_works_by_keyboard(tab):
    tab.focus("#tree tbody tr")
    tab.keyboard.press("End")
    assert tab.evaluate("document.activeElement.innerText").startswith("(not attributed)")
    for _ in range(2):
        tab.keyboard.press("ArrowUp")
    assert tab.evaluate("document.activeElement.innerText").startswith("down")
    before = len(rows(tab))
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate("document.activeElement.innerText").startswith("▾blocks.2")
    tab.keyboard.press("ArrowLeft")
    assert len(rows(tab)) == before - 2
    tab.keyboard.press("ArrowRight")
    assert len(rows(tab)) == before
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.innerText").startswith("up")


def test_tab_reaches_every_part_and_shows_where_it_is(tab):
    tab.focus("#tree tbody tr")
    tab.keyboard.press("End")  # the row that Tab comes back to is one that the filter hides
    tab.fill("#filter", "blocks.2.down")
    assert tab.inner_text("#found").startswith("1 of ")
    tab.focus(".skip")
    seen = []
    for _ in range(30):
        tab.keyboard.press("Tab")
        at, outline = tab.evaluate(
            "(e => [e.id || e.name || e.closest('table, section')?.id || e.tagName,"
            " getComputedStyle(e).outlineStyle])(document.activeElement)"
        )
        if at == "BODY":
            break
        assert outline == "solid", at
        seen.append(at)
    stops = ["plans-scroll", "plan", "filter", "open-all", "close-all", "tree", "measure"]
    assert [at for at in seen if at in stops] == stops
    tab.fill("#filter", "no such thing")
    assert "no module has no such thing" in tab.inner_text("#found")
    tab.fill("#filter", "")
    assert tab.inner_text("#found") == ""


def test_a_plan_is_chosen_by_keyboard(tab):
    tab.focus("#plans input[value='0']")
    tab.keyboard.press("ArrowDown")
    assert tab.inner_text("#plan-title").startswith("second")


def test_layouts_have_the_color_of_their_axis(tab):
    classes = tab.eval_on_selector_all(
        "#tree .axis", "spans => [...new Set(spans.map(s => s.textContent[0] + s.className))]"
    )
    assert sorted(classes) == ["daxis axis-0", "taxis axis-1"]
    drawn = tab.evaluate(
        "['0', '1'].map(i => getComputedStyle(document.querySelector(`#tree .axis-${i}`)).color)"
    )
    assert len(set(drawn)) == 2


def test_collectives_name_the_line_that_causes_them(tab):
    tab.click("#plans tr[data-index='1']")
    first = tab.inner_text("#moves tbody tr")
    assert first.split("\t")[1:] == [
        "reduce_scatter dp: gradient of embed.weight", "1", "8.00 MiB", "3.50 ms",
        "linear at model_.py:50",
    ]  # fmt: skip
    assert tab.get_attribute("#moves tbody tr td:last-child", "title").endswith("/model_.py:50")


def test_a_page_is_small_and_says_why_it_cannot_be_drawn(open_page, text):
    assert len(text) < 1.95e6
    packed = re.search(r'<script id="data"[^>]*>([^<]*)<', text)[1]
    tab = open_page(text.replace(packed, "damaged"))
    assert tab.inner_text("#unreadable").startswith("This page cannot be drawn: ")


def test_the_treemap_adds_up(tab):
    tab.click("#plans tr[data-index='1']")
    tab.select_option("#measure", "compute")
    labels, values, parents = tab.evaluate(
        "(t => [t.labels, t.values, t.parents])(document.getElementById('map')._fullData[0])"
    )
    total = sum(op.seconds for op in plans.transformer().ops)
    assert values[0] == pytest.approx(total)
    inner = [v for v, parent in zip(values, parents, strict=True) if parent == "0"]
    assert sum(inner) == pytest.approx(total)
    assert "itself" in labels
    tab.select_option("#measure", "memory")
    labels, values, parents = tab.evaluate(
        "(t => [t.labels, t.values, t.parents])(document.getElementById('map')._fullData[0])"
    )
    assert values[0] == 120 * plans.MIB, "the peak of this plan"
    inner = [v for v, parent in zip(values, parents, strict=True) if parent == "0"]
    assert sum(inner) == values[0]
    assert "(not attributed)" in labels
    tab.select_option("#measure", "compute")


def test_timeline_and_measurement_are_shown(tab):
    tab.locator("#timeline").scroll_into_view_if_needed()
    tab.wait_for_selector("#timeline .main-svg")
    names, rows = tab.evaluate(
        "(c => [c._fullData.map(t => t.name), c._fullLayout.yaxis.ticktext])"
        "(document.getElementById('timeline'))"
    )
    assert {"forward", "backward", "compute", "comm"} <= set(names)
    assert rows[-1] == "trace.json: rank 0 comm"
    assert rows[0].startswith("as simulated: ")
    seen = [row.inner_text().split("\t") for row in tab.query_selector_all("#measured tbody tr")]
    assert seen == [
        ["run", "step", "100 ms", "125 ms", "0.80"],
        ["run", "peak memory of tensors", "150 MiB", "200 MiB", "0.75"],
        ["other", "step", "100 ms", "100 ms", "1.00"],
    ]


def test_memory_over_the_step_is_stacked_by_cause(tab):
    tab.click("#plans tr[data-index='2']")
    tab.locator("#over").scroll_into_view_if_needed()
    tab.wait_for_selector("#curve .main-svg")
    names, tops = tab.evaluate(
        "(c => [c._fullData.map(t => t.name), c._fullData.at(-1).y])"
        "(document.getElementById('curve'))"
    )
    assert names == ["saved for backward", "gathered parameters", "temporaries", "in all"]
    assert tops == pytest.approx([at + 3 for at in range(9)], rel=1e-3)
    assert tab.inner_text("#over-peak") == "11.0 MiB, in linear, forward"
    tab.click("#plans tr[data-index='1']")  # a plan without a curve
    assert not tab.is_visible("#over")


def test_it_fits_a_phone(open_page, text):
    tab = open_page(text, viewport={"width": 400, "height": 800}, is_mobile=True, has_touch=True)
    assert tab.evaluate("document.documentElement.scrollWidth") == 400
    legend, plot = tab.evaluate(
        "['.legend', '.nsewdrag'].map(part => (b => [b.top, b.bottom])"
        "(document.querySelector(`#frontier ${part}`).getBoundingClientRect()))"
    )
    assert legend[1] <= plot[0] + 5, "the legend is above the points"
    assert tab.query_selector("#frontier .modebar-btn") is None


def test_one_number_of_devices_is_no_choice(open_page):
    tab = open_page(
        page([Shown("searched", plans.simple("searched", 90, 4096, comm_ms=15))], "one")
    )
    assert not tab.is_visible("#devices")
    assert tab.inner_text("#plan-title") == "searched, dp=2 on 2xcpu"
    axis = "document.getElementById('frontier')._fullLayout.xaxis.title.text"
    assert tab.evaluate(axis) == "memory per rank, GiB"


def test_it_is_readable_in_the_dark(open_page, text):
    tab = open_page(text, color_scheme="dark")
    paper, ink = tab.evaluate(
        "(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))"
    )
    assert contrast(paper, ink) > 7
    axis = tab.evaluate("getComputedStyle(document.querySelector('.axis-1')).color")
    assert contrast(paper, axis) > 4.5
    chart = tab.evaluate("document.getElementById('frontier')._fullLayout.font.color")
    assert int(chart[1:3], 16) > 0xC0


def test_it_prints_all_of_the_tables(tab):
    tab.emulate_media(media="print")
    assert not tab.is_visible("#filter")
    assert tab.evaluate("getComputedStyle(document.querySelector('.scroll')).overflow") == "visible"
    assert len(tab.pdf()) > 10_000
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    width = "document.querySelector('#frontier .main-svg').clientWidth"
    assert tab.evaluate(width) < 700, "pixels that a page of paper has"
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.emulate_media(media="screen")
    assert tab.evaluate(width) > 1000
    assert tab.is_visible("#filter")


def test_126_layers_that_differ_open_in_two_seconds(open_page):
    ops, parameters, transfers = [], [], []
    for i in range(126):
        for kept, made in zip((ops, parameters, transfers), plans.block(i, odd=i % 2), strict=True):
            kept += made
    deep = replace(plans.transformer(), ops=tuple(ops), parameters=tuple(parameters),
                   transfers=tuple(transfers), remarks=())  # fmt: skip
    text = page([Shown("deep", deep)], "deep")
    tab = open_page(text)
    assert float(tab.get_attribute("html", "data-tables")) < 2000, "ms until all can be read"
    assert tab.metrics()["TaskDuration"] < 4, "seconds of its thread until all is drawn"
    assert len(rows(tab)) == 128
    tab.click("#open-all")
    assert len(rows(tab)) == 2 + 3 * 126


def contrast(one, other):
    """WCAG 2's contrast ratio of two colors as browsers write them."""

    def luminance(color):
        parts = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_layer_shows_what_each_device_holds(tab):
    assert tab.inner_text("#layer-title") == "One layer: blocks.0-1, 2 equal ones"
    assert tab.inner_text("#rank-text") == "0 of 4: dp 0, tp 0"
    first = "#steps tbody tr:first-child td:nth-child(4) .tiles"
    filled = f"[...document.querySelectorAll('{first} span')].map(s => s.className)"
    assert tab.evaluate(filled) == ["mine", "", "", ""]  # dp splits the rows, tp the columns
    tab.focus("#rank")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#rank-text") == "1 of 4: dp 0, tp 1"
    assert tab.evaluate(filled) == ["", "mine", "", ""]
    last = tab.locator("#steps tbody tr").nth(1).locator("td").nth(2).locator(".tiles")
    assert "device holds 1 of 2 parts; to be summed" in last.get_attribute("aria-label")
    tab.keyboard.press("ArrowLeft")


def test_another_plan_is_compared(tab):
    assert tab.inner_text("#other") == "second\nthird\nbase"
    expected = diff_text(difference(shown()[0].plan, shown()[1].plan), (ODD, "second"))
    assert tab.text_content("#difference") == expected
    assert "4.37 ms" in expected  # from 45.63 to 50 ms
    tab.select_option("#other", label="base")
    expected = diff_text(difference(shown()[0].plan, shown()[3].plan), (ODD, "base"))
    assert tab.text_content("#difference") == expected
    tab.click("#plans tr[data-index='1']")
    assert "second" not in tab.inner_text("#other")
    assert tab.input_value("#other") == "3"  # the choice stays
