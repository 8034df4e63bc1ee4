"""Rows of the busiest device, of one number and of the loads of experts."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.machine.expert_loads import busiest_over_mean, busiest_share
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.presets import preset

OWNED = np.array([1 / 8, 1 / 4, 1 / 2, 1.0])
DRAWN = tuple(np.random.default_rng(3).gamma(2.0, size=8).tolist())


def test_one_number_is_the_skew_on_any_number_of_devices():
    assert busiest_share(1.25, OWNED).tolist() == [0.15625, 0.3125, 0.625, 1.0]
    assert busiest_share(3.0, OWNED).tolist() == [0.375, 0.75, 1.0, 1.0]
    assert {busiest_over_mean(3.0, owned) for owned in OWNED[:-1]} == {3.0}


def test_devices_have_the_rows_of_the_experts_that_they_hold():
    rows = np.array(DRAWN) / sum(DRAWN)
    expected = [rows.reshape(parts, -1).sum(1).max() for parts in (8, 4, 2, 1)]
    assert busiest_share(DRAWN, OWNED) == pytest.approx(expected)


def test_more_experts_on_a_device_even_out():
    found = [busiest_over_mean(DRAWN, owned) for owned in OWNED]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.0)
    assert busiest_over_mean((7.0,) * 6, 1 / 8) == pytest.approx(1.0)


def test_devices_that_hold_unequal_numbers_of_experts():
    """Of five experts three devices hold two, two and one."""
    assert busiest_share((1.0, 1.0, 2.0, 2.0, 4.0), np.array([0.4])) == pytest.approx([0.4])


def test_loads_are_those_of_a_machine_file():
    machine = replace(preset("8xH100"), expert_skew=DRAWN)
    assert "expert_skew = [" in to_toml(machine)
    assert parse_toml(to_toml(machine)).expert_skew == DRAWN
