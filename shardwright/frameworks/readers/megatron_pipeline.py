"""Megatron-LM's pipelines: virtual stages and the layers of every stage."""

from __future__ import annotations

import re
from typing import Any

from shardwright.frameworks.settings import Settings

_LAYERS_PER_VIRTUAL = "num-layers-per-virtual-pipeline-stage"
_VIRTUAL = "num-virtual-stages-per-pipeline-rank"
_LAYOUT = "pipeline-model-parallel-layout"
_FIRST, _LAST = (f"decoder-{end}-pipeline-num-layers" for end in ("first", "last"))
_EXPANDED = 4096  # characters of a layout, at most
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([EtmL|])\*(\d{1,4})")


def pipeline(settings: Settings, pp: int, layers: int | None) -> dict[str, Any]:
    """Schedule, virtual stages and cut: 1F1B, interleaved where there are virtual stages."""
    if pp == 1:
        return {}
    virtual = settings.integer(_VIRTUAL, 1, "virtual_stages")
    cut = None
    each = settings.integer(_LAYERS_PER_VIRTUAL, None, "virtual_stages")
    if each is not None:
        settings.require(layers is not None, _LAYERS_PER_VIRTUAL, "num-layers is needed too")
        stages = (layers or 0) / each / pp
        settings.require(
            stages.is_integer() and stages >= 1,
            _LAYERS_PER_VIRTUAL,
            f"a number that with {pp} pipeline ranks divides the {layers} layers is needed",
        )
        virtual = int(stages)
    layout = settings.text(_LAYOUT, None, "virtual_stages", "stage_cut")
    if layout is not None:
        cut = layout_cut(settings, layout)
        settings.require(len(cut) % pp == 0, _LAYOUT, f"stages for {pp} pipeline ranks are needed")
        virtual = len(cut) // pp
    elif _FIRST in settings or _LAST in settings:
        cut = _uneven(settings, pp, virtual, layers)
    for name in ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"):
        if settings.switch(name, False, "stage_cut"):
            settings.differ(name, "stages are read as equal in time")
    return {
        "schedule": "Interleaved1F1B" if virtual > 1 else "1F1B",
        "virtual_stages": virtual,
        "stage_cut": cut,
    }


def _uneven(
    settings: Settings, pp: int, virtual: int, layers: int | None
) -> tuple[int, ...] | None:
    """The layers of each stage where the first or the last group has another number of them."""
    name = _FIRST if _FIRST in settings else _LAST
    settings.require(layers is not None, name, "num-layers is needed too")
    first = settings.integer(_FIRST, None, "stage_cut")
    last = settings.integer(_LAST, None, "stage_cut")
    groups = pp - (first is not None) - (last is not None)
    inner = (layers or 0) - (first or 0) - (last or 0)
    even = inner >= 0 and (groups == 0 or inner % (groups * virtual) == 0)
    even = even and all((n or 0) % virtual == 0 for n in (first, last))
    settings.require(
        even, name, f"numbers that leave equal stages to the other {groups} are needed"
    )
    middle = inner // groups if groups else 0
    row = [first if first is not None else middle, *[middle] * (pp - 2)]
    row.append(last if last is not None else middle)
    return tuple(n // virtual for n in row) * virtual


def layout_cut(settings: Settings, layout: str) -> tuple[int, ...]:
    """Layers of every stage of a layout such as `Et*2|(tt|)*3mL`; raises `FrameworkError`.

    E is the embedding, t a layer, m a layer that predicts further tokens, L the loss.
    """
    text = layout.replace(" ", "").replace(",", "")
    for _ in range(16):
        if "*" not in text or len(text) > _EXPANDED:
            break
        text = _REPEATED.sub(lambda m: (m[1] or m[3] or "") * min(int(m[2] or m[4]), 4096), text)
        text = text[: _EXPANDED + 1]
    text = text.replace("(", "").replace(")", "") if "*" not in text else text
    known = set(text) <= set("EtmL|") and len(text) <= _EXPANDED and text != ""
    settings.require(known, _LAYOUT, "a layout such as 'Et*2|(tt|)*3mL' is needed")
    return tuple(stage.count("t") for stage in text.split("|"))


def layout_text(cut: tuple[int, ...]) -> str:
    """The layout whose stages have these layers, the embedding first and the loss last.

    >>> layout_text((2, 3))
    'Ett|tttL'
    """
    return "E" + "|".join("t" * layers for layers in cut) + "L"
