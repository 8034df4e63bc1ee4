"""Values that the page can set, and refusals of others."""

import pytest

from shardwright.cli.errors import UsageError
from shardwright.cli.explore.sliders import chosen, sliders
from shardwright.machine.presets import preset
from shardwright.train.targets.target_text import Target


def found(target, machine="8xH100", limit=None):
    return {slider.name: slider for slider in sliders(target, preset(machine), limit)}


def test_a_config_has_sizes_of_its_batch_and_a_function_has_none():
    usable = preset("8xH100").device.usable_bytes
    known = found(Target("config.json", batch=6, seq=1024))
    assert known["devices"].values == (1, 2, 3, 4, 5, 6, 7, 8) and known["devices"].start == 7
    assert known["memory"].values[-1] == usable and known["memory"].texts[-1] == "78.1 GiB"
    assert known["batch"].values == (1, 2, 3, 6, 12, 24, 48) and known["batch"].start == 3
    assert known["seq"].values[known["seq"].start] == 1024
    assert list(found(Target("train.py:job"))) == ["devices", "memory"]
    assert list(found(Target("config.json", batch=6))) == ["devices", "memory", "batch"]


def test_a_limit_of_the_user_is_one_of_the_values_and_many_counts_are_powers_of_two():
    known = found(Target("train.py:job"), "32x8xH100", 5 * 2**30)
    assert known["memory"].texts[known["memory"].start] == "5.00 GiB"
    assert known["devices"].values == (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_values_come_from_the_query_or_are_the_first_ones():
    known = sliders(Target("config.json", batch=8, seq=64), preset("4xH100"), None)
    assert chosen(known, {"devices": "2"}) == {
        "devices": 2,
        "memory": preset("4xH100").device.usable_bytes,
        "batch": 8,
        "seq": 64,
    }
    for text in ("3.0", "5", "", "-1", "²", "9" * 5000):
        with pytest.raises(UsageError, match="devices is one of 1, 2, 3, 4, not"):
            chosen(known, {"devices": text})
