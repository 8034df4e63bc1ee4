"""Who notices a deleted or swapped instruction; `scripts/campaign_programs.py` tries 300."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.program.step.instructions import Accumulate, Add, Free, Transfer, Wait
from tests.harness import mutations

SEEN = Path(__file__).parents[2] / "scripts" / "campaign_programs.json"
A_FEW = {2: ("dp_shard=2", "dp_shard=2 zero=2 mb=2")}


@pytest.mark.ranks
@pytest.mark.hf
def test_changes_of_a_program_are_refused_or_change_its_numbers():
    found = mutations.campaign(24, 1, A_FEW)
    assert not found[mutations.UNEXPLAINED]
    assert sum(found["together"].values()) == 24
    assert {"verify", "numbers"} <= found["together"].keys()


def test_the_campaign_explained_every_change():
    seen = json.loads(SEEN.read_text())
    assert not seen[mutations.UNEXPLAINED]
    assert sum(seen["together"].values()) >= 300
    assert {"verify", "numbers"} <= seen["together"].keys()
    assert seen["noticed"].keys() == {text for some in mutations.SUBJECTS.values() for text in some}


def test_what_changes_numbers_needs_an_explanation():
    add, free = Accumulate("total/w", "grad/w"), Free(("grad/w",))
    wait, read = Wait("t1", ("a",)), Add("b", ("a", "c"))
    assert mutations.explained(("delete", 0, (add, free))) == mutations.UNEXPLAINED
    assert mutations.explained(("delete", 1, (add, free))) == "values live longer"
    assert mutations.explained((0, 1, (add, replace(add, value="other")))) == "any order"
    assert mutations.explained((0, 1, (read, replace(read, result="a")))) == mutations.UNEXPLAINED
    assert mutations.explained((0, 1, (wait, add))) == "any order"
    sent = Transfer("sum", "dp", (), "t1"), Transfer("sum", "dp", (), "t2")
    assert mutations.explained((0, 1, sent)) == mutations.UNEXPLAINED
