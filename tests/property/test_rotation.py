"""Parts of large matrices: every kind on each commit, every case on some, the same for a commit."""

from itertools import product

import pytest

from tests.harness import rotation
from tests.harness.rotation import commit, rotating

EVERY = list(product(("gpt2", "llama", "cnn", "mlp"), (2, 3, 4), range(4)))
KINDS = {kind for case in EVERY for kind in case[:2]}
COMMITS = [f"{number:040x}" for number in range(60)]


@pytest.fixture
def part(monkeypatch):
    """The part of `EVERY` that a commit runs."""

    def of_commit(name, *given):
        monkeypatch.setattr(rotation, "commit", lambda: name)
        return rotating(EVERY, *given)

    return of_commit


def kinds(case):
    return case[:2]


def test_a_commit_runs_its_part_in_order_with_every_kind(part):
    for name in COMMITS:
        found = part(name, 6, kinds)
        assert found == [case for case in EVERY if case in set(found)]
        assert {kind for case in found for kind in kinds(case)} == KINDS
        assert len(found) == len(EVERY) / 6
        assert found == part(name, 6, kinds)


def test_commits_together_run_all(part):
    assert {case for name in COMMITS for case in part(name, 6, kinds)} == set(EVERY)


def test_kinds_come_first_where_the_part_is_smaller(part):
    for name in COMMITS:
        assert {case[0] for case in part(name, 1000, lambda case: case[:1])} == {
            case[0] for case in EVERY
        }
        assert len(part(name, 1000)) == 1


def test_all_cases_are_run_on_demand(part):
    assert part(rotation.WHOLE, 6, kinds) == EVERY


def test_the_commit_is_that_of_the_repository_or_the_one_that_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("TEST_CASES", "another")
    assert commit.__wrapped__() == "another"
    monkeypatch.delenv("TEST_CASES")
    found = commit.__wrapped__()
    assert found == "no commit" or len(found) == 40
    monkeypatch.delenv("TEST_CASES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit.__wrapped__() == "no commit"
