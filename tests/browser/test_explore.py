"""The page of `explore` in a browser: keys move sliders, changes show, a row sets them again."""

import threading

import pytest
from playwright.sync_api import expect

from shardwright.cli.commands.explore import server_of
from shardwright.cli.errors import UsageError
from shardwright.cli.explore.explorer import Explored
from shardwright.cli.explore.sliders import Slider
from tests.browser.conftest import PATIENCE
from tests.harness import plans

SLIDERS = (
    Slider("devices", (1, 2, 4), ("1", "2", "4"), 2),
    Slider("memory", (2**30, 2**31), ("1.00 GiB", "2.00 GiB"), 1),
)


def find(values):
    """Half the time on twice the devices; with little memory nothing."""
    if values["memory"] == 2**30:
        raise UsageError("nothing fits <b>1 GiB</b>")
    seconds = 0.4 / values["devices"]
    content = {
        "verdict": f"fits on {values['devices']}",
        "strategy": f"DDP {values['devices']}",
        "notes": ["float32"],
        "answer": [["speed", "fast"]],
        "seconds": seconds,
        "bytes": 2**30,
        "rate": 100 / seconds,
        "unit": "tokens/s",
    }
    return Explored(plans.simple("data parallel", 90, 320), 2**31, content)


@pytest.fixture(scope="module")
def address():
    with server_of(find, SLIDERS, "a <model>", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


@pytest.fixture(params=[1200, 390], ids=["wide", "narrow"])
def tab(browser, address, request):
    faults = []
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    context.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    opened = context.new_page()
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.goto(address)
    yield opened
    assert faults == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= request.param
    context.close()


def test_keys_plan_again_and_the_change_is_shown(tab):
    expect(tab.locator("h1")).to_have_text("a <model>")
    expect(tab.locator("#fit")).to_have_text("fits on 4")
    tab.focus("#slider-0")
    tab.keyboard.press("ArrowLeft")
    expect(tab.locator("#fit")).to_have_text("fits on 2")
    expect(tab.locator("#change")).to_contain_text("1,000 tokens/s → 500 tokens/s (−50.0 %)")
    expect(tab.locator("#change")).to_contain_text("strategy was DDP 4")
    assert tab.get_attribute("#slider-0", "aria-valuetext") == "2"
    tab.focus("#slider-1")
    tab.keyboard.press("ArrowLeft")
    expect(tab.locator("#fit")).to_have_text("nothing fits <b>1 GiB</b>")
    expect(tab.locator("#report")).to_be_hidden()
    rows = tab.locator("#tried tbody tr")
    expect(rows).to_have_count(3)
    rows.nth(2).get_by_role("button").click()
    expect(tab.locator("#fit")).to_have_text("fits on 4")
    expect(rows).to_have_count(3)
    with tab.context.expect_page() as opened:
        tab.locator("#report").click()
    expect(opened.value.locator("h1")).to_contain_text("a <model>: devices 4")
