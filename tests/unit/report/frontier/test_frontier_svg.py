"""What notebooks show of plans and frontiers."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from shardwright.ir.frontier import Frontier
from shardwright.public import Plan
from shardwright.report.frontier.frontier_svg import HEIGHT, WIDTH, frontier_html
from shardwright.report.text.explain import explain
from tests.harness import plans


def circles(html):
    return list(ET.fromstring(html).iter("circle"))


def test_every_plan_and_baseline_is_a_point_inside_of_the_picture():
    front = plans.frontier()
    found = circles(frontier_html(front))
    assert len(found) == 5
    assert [c.get("fill") == "none" for c in found] == [False] * 3 + [True] * 2
    assert all(0 < float(c.get("cx")) < WIDTH and 0 < float(c.get("cy")) < HEIGHT for c in found)
    fast, _, small = found[:3]
    assert float(fast.get("cy")) > float(small.get("cy")), "faster is lower"
    assert float(fast.get("cx")) > float(small.get("cx")), "smaller is left"
    assert found[1].find("title").text.startswith("plan 1: ")
    assert found[3].find("title").text == "data parallel: 90 ms, 0.3125 GiB"


def test_a_lone_plan_is_in_the_middle():
    (circle,) = circles(frontier_html(Frontier((plans.simple(),))))
    assert float(circle.get("cx")) == WIDTH / 2


@pytest.mark.parametrize("name", ["<b>bold</b>", "a & b"])
def test_names_with_markup_stay_text(name):
    odd = replace(plans.simple(), name=name)
    page = ET.fromstring(Plan.of(odd)._repr_html_())
    assert name in page.find("summary").text
    assert page.find("pre").text == explain(odd)
    front = Frontier((plans.simple(ms=10),), (odd,))
    assert name in "".join(ET.fromstring(frontier_html(front)).itertext())
