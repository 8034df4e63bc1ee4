import pytest


def test_frontier_prints_table_chart_and_legend(api, target, shardwright_command):
    result = shardwright_command("frontier", target, "--machine", "2xcpu")
    assert result.exit_code == 0, result.exception
    assert f"{target} on 2xcpu" in result.stdout
    assert "step time over memory per rank; o: plan on the frontier, a: data parallel" in (
        result.stdout
    )
    assert result.stdout.count("dp=2") == 5


def test_frontier_json_holds_every_point_of_every_device_count(api, target, as_json):
    found = as_json("frontier", target, "--machine", "8xcpu", "--devices", "4,1, 2")
    assert [p["devices"] for p in found["points"]] == [1] * 3 + [2] * 3 + [4] * 3
    assert {"step_seconds", "peak_bytes", "devices", "summary"} <= set(found["points"][0])
    assert [p["name"] for p in found["baselines"][:2]] == ["data parallel", "fully sharded"]
    assert found["search_seconds"] == 0.75


def test_without_devices_the_whole_machine_is_searched(api, target, as_json):
    found = as_json("frontier", target, "--machine", "8xcpu")
    assert {p["devices"] for p in found["points"]} == {8}


def test_device_counts_have_their_own_marks(api, target, shardwright_command):
    result = shardwright_command("frontier", target, "--machine", "8xcpu", "--devices", "2,4")
    assert "2: 2 devices, 4: 4 devices" in result.stdout


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
