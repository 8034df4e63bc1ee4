from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from shardwright.machine.efficiency_curve import Curve
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.measurement import Measured
from shardwright.machine.model import Efficiency, MachineError
from shardwright.machine.presets import preset

AT = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
MEASURED = Measured(AT, 0.02, (("matmul", 0.01, 0.2), ("host all_reduce", 0.1, 0.3)))
MACHINE = replace(
    preset("2xcpu"),
    measured=MEASURED,
    gather_overlap=0.25,
    device=replace(
        preset("2xcpu").device,
        dispatch_seconds=2.5e-5,
        parameter_seconds=4e-5,
        packing_seconds=1e-5,
        efficiency=Efficiency(update=Curve(((1e6, 0.5), (1e8, 0.25)))),
    ),
)


def test_a_measured_machine_survives_the_trip_through_toml():
    assert parse_toml(to_toml(MACHINE)) == MACHINE
    assert parse_toml(to_toml(MACHINE)).with_devices(1).measured == MEASURED


def test_a_good_measurement_is_believed():
    assert MEASURED.doubts == ()


def test_what_was_disturbed_or_fits_badly_is_doubted():
    assert replace(MEASURED, busy=0.4).doubts == ("other programs took 40% of the cores meanwhile",)
    badly = replace(MEASURED, errors=(("matmul", 0.01, 0.2), ("memory", 0.9, 3.0)))
    assert badly.doubts == ("the figures miss half of the samples of memory by 90%",)


@pytest.mark.parametrize(
    "later, words",
    [
        (timedelta(seconds=20), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(hours=5, minutes=59), "5 hours ago"),
        (timedelta(days=40), "40 days ago"),
        (timedelta(days=-2), "at a time that this host's clock has not reached"),
    ],
)
def test_its_age_is_told_in_words(later, words):
    assert MEASURED.age(AT + later) == words


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("busy = 0.02", "busy = 2", "measured.busy is 2; give a part"),
        ("busy = 0.02", "load = 2", "measured has the unknown key 'load'; remove it or use one of"),
        ("at = 2026-01-31T12:30:00+00:00", 'at = "today"', "measured.at is 'today'; write a date"),
        ('"matmul" = [0.01', '"\\u001b[2J" = [0.01', "has the control character '\\x1b'"),
        ("[0.01, 0.2]", "[0.01]", "measured.errors holds pairs of numbers by kind"),
        ('dispatch = "25us"', "dispatch = 25", "device.dispatch is 25, without a unit"),
        ('parameter = "40us"', 'parameter = "40kB"', "device.parameter is '40kB', which has the"),
        ('packing = "10us"', 'packing = "-1us"', "device.packing is '-1us'; write a number"),
        ("gather_overlap = 0.25", "gather_overlap = 1.5", "gather_overlap is 1.5; give a part"),
        ('[["1MB", 0.5]', '[["1MFLOP", 0.5]', "device.efficiency.update is '1MFLOP', which has"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(old, new, says):
    text = to_toml(MACHINE)
    assert old in text
    with pytest.raises(MachineError) as caught:
        parse_toml(text.replace(old, new))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_mixed_devices_pay_for_the_slower_update():
    none = dict.fromkeys(("dispatch_seconds", "packing_seconds"))
    other = replace(MACHINE.device, **none, efficiency=Efficiency(memory=0.125))
    found = MACHINE.device.slower(other)
    assert found.dispatch_seconds == 2.5e-5 and found.parameter_seconds == 4e-5
    assert found.packing_seconds == 1e-5
    assert found.efficiency.in_place.at(1e8) == 0.125
