from shardwright.machine import host_memory


def test_memory_is_that_of_the_container_where_it_has_a_limit(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_memory, "_LIMIT", limit)
    whole = host_memory.host_bytes()
    limit.write_text("max\n")
    assert host_memory.host_bytes() == whole > 2**28
    limit.write_text(f"{2**28}\n")
    assert host_memory.host_bytes() == 2**28
