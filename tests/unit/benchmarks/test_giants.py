"""Giants: sizes are the published ones, rows go on where they were, and the page shows both."""

import pytest

from benchmarks.giants.models import GIANTS
from benchmarks.giants.page import body
from benchmarks.giants.run import parameters, row

PUBLISHED = {"Mixtral-8x22B": 141, "gpt-oss-120b": 117, "MiniMax-M2": 229}  # billions
FOUND = {
    "verdict": "fits",
    "gib": 60.0,
    "room_gib": 18.1,
    "seconds": 10.0,
    "tokens_per_second": 1638.4,
    "utilisation": 0.25,
    "headline": "FSDP 256",
    "degrees": {"ep": 8, "cp": 1, "tp": 1, "pp": 1},
}


def known(name, **others):
    priced = {text: {**FOUND, **others} for text in GIANTS[name].strategies}
    run = {"wall_seconds": 99.0, "cpu_seconds": 88.0, "peak_gib": 1.5}
    return {
        "parameters": 141e9,
        "command": run,
        "planned": FOUND,
        "others": {"source": GIANTS[name].source, "priced": priced},
    }


@pytest.mark.hf
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_models_have_their_published_number_of_parameters(name):
    assert round(parameters(GIANTS[name].config) / 1e9) == PUBLISHED[name]


def test_what_a_row_has_is_not_computed_again():
    before = known("Mixtral-8x22B")
    after = row("Mixtral-8x22B", 0.0, before)
    assert {key: after[key] for key in before} == before


def test_the_page_shows_a_plan_and_the_fastest_strategy_that_fits():
    mixtral = row("Mixtral-8x22B", 0.0, known("Mixtral-8x22B", seconds=20.0))
    first, second = mixtral["others"]["priced"]
    mixtral["others"]["priced"][first] = {**FOUND, "seconds": 5.0, "room_gib": -1.0}
    text = body({"preset": "32x8xH100", "rows": [mixtral]})
    assert (
        "| Mixtral-8x22B | 141 B | 10.0 | 1,638 | 25% | 60.0 | 18.1 |  | 8 |  |  | 99 (88) | 1.5 |"
        in text
    )
    assert f"| Mixtral-8x22B | 20.0 | 2.00 | 60.0 | `{second}` |" in text


def test_the_page_shows_what_is_refused_or_does_not_fit():
    name = "Llama-4-Maverick"
    refused = row(name, 0.0, known(name))
    (only,) = refused["others"]["priced"]
    refused["others"]["priced"] = {only: {"says": "no"}}
    assert f"| {name} | refused |  |  | `{only}` |" in body({"preset": "", "rows": [refused]})
    large = row(name, 0.0, known(name, room_gib=-3.0))
    assert "60.0 (over)" in body({"preset": "", "rows": [large]})


@pytest.mark.parametrize("note, said", [("all 4 experts of x compute every token", 1), ("", 0)])
def test_the_page_names_plans_whose_experts_computed_every_token(note, said):
    name = "Llama-4-Maverick"
    found = row(name, 0.0, {**known(name), "planned": {**FOUND, "notes": [note]}})
    text = body({"preset": "", "rows": [found]})
    assert text.count(f"In the plan of {name} all experts compute every token") == said
