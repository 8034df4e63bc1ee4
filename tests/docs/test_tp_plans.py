"""The page of Hugging Face's tensor parallelism: of all families, and of the plans they ship."""

import pytest

from scripts.tp_plans import FAMILIES, PAGE, page, read


def test_the_page_is_what_the_script_writes():
    sections = read(PAGE.read_text())
    assert list(sections) == list(FAMILIES)
    assert page(sections) == PAGE.read_text()


@pytest.mark.hf
@pytest.mark.parametrize("family", FAMILIES)
def test_theirs_is_what_transformers_ships(family):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    rows = read(PAGE.read_text())[family].modules.splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    theirs = {name.strip("`"): style for name, style, *_ in cells}
    shipped = CONFIG_MAPPING[family].base_model_tp_plan
    base = "gpt_neox" if family == "gpt_neox" else "model"
    assert {f"{base}.{name}": style for name, style in shipped.items()}.items() <= theirs.items()
