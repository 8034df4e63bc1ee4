"""Screenshots of the report in light, dark and on a phone, compared with stored ones by structure.

A screenshot is cut into the parts of the page. Of each the place, the size, the background and the
share of pixels in other colours are compared, within what other fonts change. `UPDATE_GOLDEN=1`
stores new ones: look at the page before.
"""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardwright.report.page import page
from tests.browser.test_report import shown
from tests.harness import plans

GOLDEN = Path(__file__).parents[1] / "golden" / "screenshots.json"
SIZE = {"viewport": {"width": 1200, "height": 1000}}
PHONE = {"viewport": {"width": 400, "height": 800}}
VIEWS = {
    "light": {**SIZE, "color_scheme": "light"},
    "dark": {**SIZE, "color_scheme": "dark"},
    "narrow": {**PHONE, "color_scheme": "light"},
}
PARTS = "h1, #verdict, .chart, table, fieldset, #compare pre, h2"
WIDTH, HEIGHT = 12, 0.2  # pixels, and the fraction, by which fonts may move and stretch a part
COLOUR, INK = 24, 1.6  # of 255, and the factor, by which a part may look different


def structure(tab):
    """Of each part that is to be seen its name, box, background and share of other pixels."""
    tab.locator("#map").scroll_into_view_if_needed()  # it is drawn then
    tab.wait_for_selector("#map .slice")
    tab.evaluate("scrollTo(0, 0)")
    boxes = tab.evaluate(
        """parts => [...document.querySelectorAll(parts)].filter(
             part => part.checkVisibility()).map(part => {
          const b = part.getBoundingClientRect(), y = b.y + scrollY;
          return [part.id || part.tagName, b.x, y, b.width, b.height];
        })""",
        PARTS,
    )
    shot = Image.open(io.BytesIO(tab.screenshot(full_page=True))).convert("RGB")
    pixels = np.asarray(shot, np.int16)
    return [[name, *map(round, box), *_looks(pixels, box)] for name, *box in boxes]


def _looks(pixels, box):
    """The most frequent colour of a box in a screenshot, and the share of pixels of others."""
    x, y, width, height = map(round, box)
    part = pixels[y : y + height, x : x + width].reshape(-1, 3)
    numbers = np.bincount(part @ [1 << 16, 1 << 8, 1])
    background = np.array([numbers.argmax() >> shift & 255 for shift in (16, 8, 0)])
    ink = np.abs(part - background).max(axis=1) > COLOUR
    return [background.tolist(), round(float(ink.mean()), 4)]


def differences(now, stored):
    """The parts that are not as they were, with what is different."""
    names = [[name for name, *_ in one] for one in (now, stored)]
    if names[0] != names[1]:
        return [f"parts are {names[0]}, and were {names[1]}"]
    found = []
    for one, was in zip(now, stored, strict=True):
        name, x, y, width, height, colour, ink = one
        _, x0, y0, width0, height0, colour0, ink0 = was
        same = {
            "x": abs(x - x0) <= WIDTH,
            "y": abs(y - y0) <= WIDTH + HEIGHT * y0,
            "width": abs(width - width0) <= WIDTH + HEIGHT * width0 * (name == "fieldset"),
            "height": abs(height - height0) <= WIDTH + HEIGHT * height0,
            "background": max(abs(a - b) for a, b in zip(colour, colour0, strict=True)) <= COLOUR,
            "ink": ink0 / INK - 0.002 <= ink <= ink0 * INK + 0.002,
        }
        found += [
            f"{what} of {name}: {one}, was {was}" for what, holds in same.items() if not holds
        ]
    return found


@pytest.fixture(scope="module")
def text():
    return page(shown(), "Plans of a transformer", 200 * plans.MIB)


@pytest.fixture(scope="module")
def light(open_page, text):
    return open_page(text, **VIEWS["light"])


@pytest.mark.parametrize("name", VIEWS)
def test_the_page_looks_as_it_did(open_page, text, name):
    tab = open_page(text, **VIEWS[name])
    now = structure(tab)
    if os.environ.get("UPDATE_GOLDEN"):
        stored = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        lines = ",\n".join(
            f'"{view}": [\n' + ",\n".join(map(json.dumps, parts)) + "\n]"
            for view, parts in {**stored, name: now}.items()
        )
        GOLDEN.write_text("{\n" + lines + "\n}\n")
    assert differences(now, json.loads(GOLDEN.read_text())[name]) == []


@pytest.mark.parametrize(
    "broken",
    [
        "#frontier > * { visibility: hidden }",  # an empty chart
        "#verdict { display: none }",
        "#map { height: 200px }",
        "table { color: transparent }",
    ],
)
def test_a_page_that_is_broken_looks_different(light, broken):
    style = light.add_style_tag(content=broken)
    found = structure(light)
    style.evaluate("style => style.remove()")
    assert differences(found, json.loads(GOLDEN.read_text())["light"])
