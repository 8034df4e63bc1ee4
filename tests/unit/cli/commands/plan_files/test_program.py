"""`shardwright program`: the step program of a rank, differences, and the check of all ranks."""

import json
from pathlib import Path

import pytest

from shardwright.ir.graph import VerifyError
from shardwright.program.step.program_json import program_from_json

EXAMPLE = f"{Path(__file__).parents[5] / 'examples' / 'mlp.py'}:job"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Plans of the example in four micro-batches: parameters whole, and in two parts."""
    from click.testing import CliRunner

    from shardwright.cli import main

    folder = tmp_path_factory.mktemp("plans")
    whole, sharded = folder / "whole.json", folder / "sharded.json"
    options = ["--machine", "2xcpu", "--micro-batches", "4", "--pin", "*=dp:batch"]
    result = CliRunner().invoke(
        main, ["plan", EXAMPLE, *options, "--mesh", "dp=2", "-o", whole.as_posix()]
    )
    assert result.exit_code == 0, result.output
    data = json.loads(whole.read_text())
    for row in data["parameters"]:
        row[1] = "dp:S(0)"
    sharded.write_text(json.dumps(data))
    return whole, sharded


def test_the_program_of_a_rank_is_printed(files, shardwright_command, as_json):
    _, sharded = files
    for rank in (0, 1):
        text = shardwright_command("program", EXAMPLE, sharded, "--rank", rank).stdout
        assert text.startswith(f"rank {rank} of dp=2\n")
        assert "times in a row, with other numbers in names:" in text
        full = shardwright_command("program", EXAMPLE, sharded, "--rank", rank, "--full").stdout
        found = as_json("program", EXAMPLE, sharded, "--rank", rank)
        program = program_from_json(json.dumps(found["program"]))
        assert full.startswith(f"{program}\n\n{len(program.instructions)} instructions, ")
        assert (found["rank"], found["diff"], found["checked"]) == (rank, None, None)
        assert program.passes[0] == "overlap_sums"
    naive = as_json("program", EXAMPLE, sharded, "--passes", "naive")["program"]
    assert "passes" not in naive
    assert len(naive["instructions"]) != len(found["program"]["instructions"])
    some = as_json("program", EXAMPLE, sharded, "--passes", "free,bucket")["program"]
    assert some["passes"] == ["bucket", "free"]


def test_two_plans_are_compared(files, shardwright_command, as_json):
    whole, sharded = files
    text = shardwright_command("program", EXAMPLE, whole, "--diff", sharded).stdout
    assert text.startswith(f"--- {whole}\n+++ {sharded}\n@@ ")
    assert "\n+t1 = all_gather(" in text
    assert as_json("program", EXAMPLE, whole, "--diff", sharded)["diff"] == text.rstrip("\n")
    same = shardwright_command("program", EXAMPLE, whole, "--diff", whole).stdout
    assert same == "both programs are equal\n"


def test_all_ranks_are_checked(files, shardwright_command, as_json, monkeypatch):
    _, sharded = files
    words = " ".join(shardwright_command("program", EXAMPLE, sharded, "--check").stdout.split())
    assert words.startswith("checked the programs of 2 ranks on dp=2: their 12 collectives match")
    found = as_json("program", EXAMPLE, sharded, "--check")["checked"]
    assert found == {"ranks": 2, "collectives": 12, "error": ""}

    def broken(programs):
        raise VerifyError("rank 1 waits forever at: t1")

    monkeypatch.setattr("shardwright.cli.commands.plan_files.program.check_order", broken)
    result = shardwright_command("program", EXAMPLE, sharded, "--check")
    assert result.exit_code == 1
    assert result.stdout.endswith("do not fit together: rank 1 waits forever at: t1\n")


def test_a_whole_batch_has_a_seed_between_its_parts(shardwright_command, tmp_path):
    file = tmp_path / "plan.json"
    shardwright_command("plan", EXAMPLE, "--machine", "2xcpu", "-o", file)
    result = shardwright_command("program", EXAMPLE, file)
    assert result.stdout.startswith("rank 0 of ")
    assert result.stdout.count(" = seed") == 1


def test_mistakes_show_before_the_model_is_captured(files, mistake, api, monkeypatch, tmp_path):
    def capture(*given, **named):
        raise AssertionError("captured")

    monkeypatch.setattr(api, "capture", capture)
    whole, _ = files
    assert "rank 2 is none of the plan's 2 ranks" in mistake("program", EXAMPLE, whole, "--rank", 2)
    line = mistake("program", EXAMPLE, whole, "--diff", tmp_path / "no.json")
    assert "cannot read plan" in line
    assert "--full" in mistake("program", EXAMPLE, whole, "--full", "--diff", whole)
    assert "'buckets' is no pass; give" in mistake("program", EXAMPLE, whole, "--passes", "buckets")
