from types import SimpleNamespace

import pytest

from shardwright.ir.frontier import Frontier


def test_frontier_prints_table_chart_and_legend(api, target, shardwright_command):
    result = shardwright_command("frontier", target, "--machine", "2xcpu")
    assert result.exit_code == 0, result.exception
    assert f"{target} on 2xcpu" in result.stdout
    assert "step time over memory per rank; o: plan on the frontier, a: data parallel" in (
        result.stdout
    )
    assert result.stdout.count("dp=2") == 6


def test_frontier_json_holds_every_point_of_every_device_count(api, target, as_json):
    found = as_json("frontier", target, "--machine", "8xcpu", "--devices", "4,1, 2")
    assert [p["devices"] for p in found["points"]] == [1] * 4 + [2] * 4 + [4] * 4
    assert {"step_seconds", "peak_bytes", "devices", "summary"} <= set(found["points"][0])
    assert [p["name"] for p in found["baselines"][:2]] == ["data parallel", "fully sharded"]
    assert found["search_seconds"] == 0.75


def test_a_frontier_that_the_time_limit_ended_says_so(
    api, target, as_json, shardwright_command, monkeypatch
):
    arguments = ("frontier", target, "--machine", "2xcpu")
    words = "the time limit has ended the search"
    assert words not in shardwright_command(*arguments).stdout
    assert not as_json(*arguments)["ended_by_time_limit"]
    monkeypatch.setattr(Frontier, "ended_early", True)
    assert words in shardwright_command(*arguments).stdout
    assert as_json(*arguments)["ended_by_time_limit"]


def test_without_devices_the_whole_machine_is_searched(api, target, as_json):
    found = as_json("frontier", target, "--machine", "8xcpu")
    assert {p["devices"] for p in found["points"]} == {8}


def test_numbers_of_stages_are_searched(api, target, as_json):
    arguments = ("frontier", target, "--machine", "2xH100")
    as_json(*arguments)
    as_json(*arguments, "--stages", "2,1")
    as_json(*arguments, "--async")
    assert [asked.stages for asked in api.asked] == ["auto", (1, 2), (1,)]
    assert [asked.allow_async for asked in api.asked] == [False, False, True]


def test_numbers_of_micro_batches_are_searched(api, target, as_json):
    arguments = ("frontier", target, "--machine", "2xcpu")
    assert [p["micro_batches"] for p in as_json(*arguments)["points"]] == [1, 1, 1, 2], "they fit"
    found = as_json(*arguments, "--micro-batches", "1,2")
    assert [p["micro_batches"] for p in found["points"]] == [1, 1, 1, 2]
    assert found["points"][-1]["headline"] == "DDP 2 · 2 micro-batches"
    assert api.micro_batches == [None, (1, 2)]


def test_plans_above_a_memory_limit_are_left_out(api, target, as_json, shardwright_command):
    arguments = ("frontier", target, "--machine", "2xcpu", "--memory-limit", "150MiB")
    found = as_json(*arguments)
    assert [p["peak_bytes"] >> 20 for p in found["points"]] == [100, 80]
    assert all(p["fits"] for p in found["points"])
    assert [p["fits"] for p in found["baselines"]] == [False, True]
    assert "2 faster plans of more memory than the limit left out" in (
        shardwright_command(*arguments).stdout
    )
    arguments = (*arguments[:-1], "50MiB")
    assert len(as_json(*arguments)["points"]) == 4, "none fits"
    words = as_json(*arguments)["none_fits"]["2"]
    assert "the smallest needs 80.0 MiB per device, which may use 50.0 MiB" in words
    assert api.asked[0].memory_limit == 150 << 20


def test_device_counts_have_their_own_marks(api, target, shardwright_command):
    result = shardwright_command("frontier", target, "--machine", "8xcpu", "--devices", "2,4")
    assert "2: 2 devices, 4: 4 devices" in result.stdout


def test_device_counts_that_constraints_rule_out_are_named(
    api, target, as_json, shardwright_command
):
    api.refused = {1, 4}
    asked = ("frontier", target, "--machine", "4xcpu", "--devices", "1,2,4", "--mesh", "dp=2")
    found = as_json(*asked)
    assert {p["devices"] for p in found["points"]} == {2}
    assert found["left_out"] == {"1": "no mesh of 1", "4": "no mesh of 4"}
    assert found["constraints"] == ["mesh dp=2"]
    result = shardwright_command(*asked)
    assert "no plan on 1 device: no mesh of 1" in result.stdout


def test_constraints_that_rule_out_every_count_are_a_mistake(api, target, mistake):
    api.refused = {2, 4}
    asked = ("frontier", target, "--machine", "4xcpu", "--devices", "2,4", "--mesh", "dp=3")
    assert "mesh dp=3 is of 3, not of 4 devices" in mistake(*asked)


def test_the_seconds_are_shared_by_the_device_counts(api, target, as_json, monkeypatch):
    now = iter([100.0, 100.0, 104.0, 104.5])  # at the start, then before each search
    clock = SimpleNamespace(monotonic=lambda: next(now), perf_counter=lambda: 0.0)
    monkeypatch.setattr("shardwright.cli.planning.searching.time", clock)
    as_json("frontier", target, "--machine", "4xcpu", "--devices", "1,2,4", "--seconds", "9")
    assert [asked.seconds for asked in api.asked] == [3.0, 2.5, 4.5]


@pytest.mark.parametrize(
    "devices, message",
    [
        ("two", "'two' is no list of counts, as 1,2,4,8"),
        ("1,0", "'1,0' is no list of counts"),
        ("4,16", "16 devices asked of 8xcpu, which has 8"),
    ],
)
def test_wrong_device_counts_are_a_mistake(api, target, mistake, devices, message):
    assert message in mistake("frontier", target, "--machine", "8xcpu", "--devices", devices)
    assert api.searched == []


def test_every_device_count_is_searched_by_the_method(api, target, as_json):
    as_json("frontier", target, "--machine", "8xcpu", "--devices", "2,4", "--method", "kcut")
    assert api.methods == ["kcut", "kcut"]


def test_more_points_are_searched_and_followed(api, target, as_json):
    arguments = ("frontier", target, "--machine", "2xcpu")
    as_json(*arguments)
    as_json(*arguments, "--points", "200")
    assert [asked.points for asked in api.asked] == [48, 200]
