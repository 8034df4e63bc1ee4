import sqlite3

import pytest

from shardwright.machine.calls import Timing
from shardwright.profile.timing_cache import TimingCache

LINEAR = Timing("aten.linear.default(%0, %1) float32[4, 8] float32[16, 8]'", 1e-3, 2e-3)
FOUND = {LINEAR.call: LINEAR, "aten.odd.default(%0) float32[4]": None}


@pytest.fixture
def said():
    return []


@pytest.fixture
def known(tmp_path, said):
    return TimingCache(tmp_path / "cache" / "operators.sqlite", said.append)


def test_what_is_kept_is_found_again_on_the_same_device_only(known, said):
    assert known.find("cpu, 2 ranks") == {}
    known.keep("cpu, 2 ranks", FOUND)
    known.keep("cpu, 4 ranks", {})
    assert known.find("cpu, 2 ranks") == FOUND
    assert known.find("cpu, 4 ranks") == {}
    assert said == []


def test_what_is_measured_again_takes_the_place_of_what_was_there(known):
    known.keep("cpu", FOUND)
    slower = Timing(LINEAR.call, 5e-3, 6e-3)
    known.keep("cpu", {LINEAR.call: slower})
    assert known.find("cpu")[LINEAR.call] == slower


def test_a_damaged_database_is_set_aside_and_begun_anew(known, said):
    known.keep("cpu", FOUND)
    known.file.write_bytes(b"no database" * 100)
    assert known.find("cpu") == {}
    (line,) = said
    assert "is no database of timings" in line and "kept as operators.damaged" in line
    known.keep("cpu", FOUND)
    assert known.find("cpu") == FOUND and len(said) == 1


def test_a_database_of_something_else_is_said_and_left(known, said):
    known.file.parent.mkdir()
    with sqlite3.connect(known.file) as database:
        database.execute("CREATE TABLE timings (song TEXT)")
    assert known.find("cpu") == {}
    assert "cannot read the timings of operators" in said[0] and "no such column" in said[0]


def test_a_database_that_another_process_holds_is_told(known, said, monkeypatch):
    monkeypatch.setattr("shardwright.profile.timing_cache._WAIT_SECONDS", 0.01)
    known.keep("cpu", FOUND)
    other = sqlite3.connect(known.file)
    other.execute("BEGIN EXCLUSIVE")
    known.keep("cpu", FOUND)
    other.close()
    assert "cannot remember timings" in said[0] and "measured again the next time" in said[0]


def test_a_place_that_cannot_be_written_is_told(tmp_path, said):
    (tmp_path / "file").touch()
    known = TimingCache(tmp_path / "file" / "operators.sqlite", said.append)
    known.keep("cpu", FOUND)
    assert "cannot remember timings" in said[0]
    assert known.find("cpu") == {}


def test_a_read_only_database_is_read(known, said, monkeypatch):
    """Opened as one that may only be read, as rights do not hold root back."""
    known.keep("cpu", FOUND)
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda file, **options: connect(f"{file.as_uri()}?mode=ro", uri=True)
    )
    known.keep("cpu", {LINEAR.call: None})
    assert "cannot remember timings" in said[0] and "readonly" in said[0]
    assert known.find("cpu") == FOUND
