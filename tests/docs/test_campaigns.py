"""The page of campaigns has the figures of the committed results."""

import json

import pytest

from scripts.campaigns_page import CAMPAIGNS, PAGE, ROOT, page


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text() == page(), "run python scripts/campaigns_page.py"


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda one: one.title)
def test_a_campaign_is_a_command_with_its_code_and_nothing_is_left(campaign):
    result = json.loads((ROOT / campaign.file).read_text())
    assert result["commit"] and result["command"].startswith("python ")
    assert campaign.row(result).left == 0
