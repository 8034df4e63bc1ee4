"""`doctor --machine`: the origin of a machine's figures, without looking at this host."""


def test_the_figures_of_a_preset_have_their_origins(shardwright_command, as_json):
    result = shardwright_command("doctor", "--machine", "8xH100")
    assert result.exit_code == 0, result.exception
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "specified: H100 SXM data sheet" in lines["memory_bandwidth"]
    assert "fitted: " in lines["efficiency.matmul"]
    found = as_json("doctor", "--machine", "8xH100")
    assert found["machine"] == "8xH100"
    assert {one["kind"] for one in found["figures"]} == {"specified", "fitted", "assumed"}


def test_a_machine_is_explained_and_no_ranks_are_started(shardwright_command):
    result = shardwright_command("doctor", "--machine", "8xH100", "--ranks", "2")
    assert result.exit_code == 2
    assert "leave --ranks out" in result.stderr
    result = shardwright_command("doctor", "--machine", "8xH10")
    assert result.exit_code == 2
    assert "no preset for 'H10'" in result.stderr
