"""A real Chromium without a network, and report pages opened in it."""

import os
import shutil

import pytest

PATIENCE = 240_000  # ms for what takes two seconds, on a machine that does other work
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs a browser: install Debian's chromium")
        pytest.skip("there is no chromium here; Debian's package has one")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root has no sandbox; the pages are our own.
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def open_page(browser, tmp_path_factory):
    """Open text as a page; its errors and requests fail the module at the end."""
    contexts, faults = [], []

    def open_it(text, **options):
        file = tmp_path_factory.mktemp("page") / "report.html"
        file.write_text(text)
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        tab = context.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        tab.on("request", lambda r: faults.append(r.url) if r.url.startswith("http") else None)
        session = context.new_cdp_session(tab)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        tab.goto(file.as_uri())
        tab.wait_for_function("document.documentElement.dataset.ready === 'true'")
        tab.metrics = lambda: {
            m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]
        }
        return tab

    yield open_it
    for context in contexts:
        context.close()
    assert faults == []
