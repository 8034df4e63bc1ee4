"""Draws the pictures of README and documentation: the report in a browser, `explain` on a terminal.

Run it as `python -m scripts.pictures`; it needs chromium. Plans a 16-layer Llama for 2, 4 and 8
GPUs, which takes a minute.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
DEVICES = (2, 4, 8)
LAYERS = 16
PATIENCE = 240_000  # ms for what takes two seconds, on a machine that does other work
DRAWN = "!document.getElementById('data') || document.documentElement.dataset.ready === 'true'"


def main() -> int:
    """Write every picture again."""
    browser = shutil.which("chromium")
    if browser is None:
        print("pictures need chromium, as Debian's package has it", file=sys.stderr)
        return 1
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import shardwright as sw
    from shardwright.report.page import Shown, page
    from shardwright.report.tree import PlanTree

    config = LlamaConfig(  # that of docs/explanation/concepts.md
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=LAYERS, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(16, 2048, dtype=torch.long)
    graph = sw.capture(model, kwargs={"input_ids": ids, "labels": ids})
    shown = []
    for count in DEVICES:
        found = sw.search(graph, sw.Machine.preset(f"{count}xH100"), optimizer="adamw")
        front = found.all_settled()
        shown += [Shown(f"{count}-{i:03}", plan) for i, plan in enumerate(front)]
        shown += [Shown(plan.name, plan) for plan in front.baselines]
    limit = sw.Machine.preset("8xH100").device.usable_bytes
    fitting = [i for i, item in enumerate(shown) if item.plan.peak_bytes <= limit]
    best = min(fitting, key=lambda i: shown[i].plan.step_seconds)
    title = f"Llama of {LAYERS} layers on 2, 4 and 8 H100"
    _photograph(browser, page(shown, title, limit, chosen=best), "report.png", 1200, 930)
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(PlanTree(shown[best].plan))
    svg = console.export_svg(title="shardwright explain plan.json")
    _photograph(browser, f"<body style='margin:0'>{svg}", "explain.png", 1100, 900)
    return 0


def _photograph(browser: str, text: str, name: str, width: int, height: int) -> None:
    """The upper part of a page, as a browser without a network shows it."""
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(text)
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = opened.new_context(
            offline=True, viewport={"width": width, "height": height}, color_scheme="light"
        ).new_page()
        tab.set_default_timeout(PATIENCE)
        tab.goto(file.as_uri())
        tab.wait_for_function(DRAWN)
        tab.wait_for_timeout(1000)  # charts further down are drawn when they are in sight
        tab.screenshot(path=str(PICTURES / name))
        opened.close()


if __name__ == "__main__":
    sys.exit(main())
