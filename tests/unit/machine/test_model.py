from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.atomic_io import printable
from shardwright.machine.efficiency_curve import Curve
from shardwright.machine.files.loading import load_machine
from shardwright.machine.files.quantities import BANDWIDTH, DURATION, parse_quantity, quantity
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.model import Device, Efficiency, Level, Machine, MachineError
from shardwright.machine.presets import preset

PRESETS = [
    "8xH100",
    "1xH200",
    "2x8xA100",
    "8x8xH100",
    "4xA100-40",
    "4xV100",
    "2x4xL4",
    "8xRTX4090",
    "2x72xGB200",
    "8xMI300X",
]
PRESETS += ["2xcpu", "2x4xcpu"]

CLUSTER = """
name = "two hosts"

[device]
kind = "X1"
memory = "24GiB"
memory_bandwidth = "900GB/s"
launch = "5us"

[device.compute]
float32 = "30TFLOP/s"

[[level]]
name = "pcie"
size = 4
bandwidth = "25GB/s"
latency = "2.5us"

[[level]]
name = "ethernet"
size = 2
bandwidth = "25Gbit/s"
latency = "0.03ms"
"""


@pytest.mark.parametrize("text", PRESETS)
def test_a_preset_survives_the_trip_through_toml(text):
    machine = preset(text)
    assert machine.name == text
    assert parse_toml(to_toml(machine)) == machine


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("8xH100", [8]),
        ("2x8xA100", [8, 2]),
        ("8x8xH100", [8, 8]),
        ("1x4xV100", [4]),
        ("16xh100", [8, 2]),
        ("3x5xcpu", [5, 3]),
    ],
)
def test_the_innermost_level_comes_first(text, sizes):
    machine = preset(text)
    assert [level.size for level in machine.levels] == sizes
    speeds = [level.bytes_per_s for level in machine.levels]
    assert speeds == sorted(speeds, reverse=True)


def test_an_h100_has_its_published_figures():
    device = preset("8xH100").device
    assert device.memory_bytes == int(79.1 * 2**30)  # as torch reports it
    assert device.peak_flop_per_s("bfloat16") == 989.4e12
    assert device.bytes_per_s == 3.35e12
    assert device.launch_seconds > 0


def test_the_context_is_no_room_for_tensors():
    device = preset("8xH100").device
    assert device.context_bytes > 0 < device.workspace_bytes
    taken = device.context_bytes + device.workspace_bytes
    assert taken == device.memory_bytes - device.usable_bytes
    assert preset("2xcpu").device.context_bytes == 0
    small = replace(device, memory_bytes=device.memory_bytes // 2, context_bytes=0)
    assert device.slower(small).usable_bytes == small.usable_bytes
    with pytest.raises(MachineError, match=r"context is (\d+) .* \d+ bytes of \1 of"):
        replace(device, context_bytes=device.memory_bytes)


def test_devices_share_the_link_to_their_host_at_its_slowest():
    old, new = preset("4xV100").device, preset("8xH100").device
    assert (old.host_bytes_per_s, new.host_bytes_per_s) == (0.8 * 16e9, 0.8 * 64e9)
    assert new.slower(old).host_bytes_per_s == old.host_bytes_per_s
    assert new.slower(old).host_memory_bytes == old.host_memory_bytes == 64 * 2**30
    assert new.slower(replace(old, host_bytes_per_s=None)).host_bytes_per_s is None
    with pytest.raises(MachineError, match="host_bandwidth is -1; give more than zero"):
        replace(new, host_bytes_per_s=-1)


def test_a_dtype_without_a_figure_takes_that_of_float32():
    device = preset("2xcpu").device
    assert device.peak_flop_per_s("bfloat16") == device.peak_flop_per_s("float32")


def test_specified_machines_say_what_is_assumed():
    assert "published" in preset("8xH100").provenance
    assert "assumed" in preset("2xcpu").provenance


def test_processes_share_their_hosts_network():
    two, four = (preset(text).levels[1] for text in ("2x2xcpu", "2x4xcpu"))
    assert two.bytes_per_s == 2 * four.bytes_per_s


@pytest.mark.parametrize(
    "devices, name",
    [(1, "1xA100"), (2, "2xA100"), (8, "8xA100"), (10, "2x5xA100"), (12, "2x6xA100")],
)
def test_fewer_devices_stay_together(devices, name):
    machine = preset("2x8xA100").with_devices(devices)
    assert machine == preset(name)
    assert machine.devices == devices


def test_all_devices_are_the_machine_itself():
    machine = preset("8xH100")
    assert machine.with_devices(8) is machine


def test_a_described_machine_keeps_its_name_with_fewer_devices():
    assert parse_toml(CLUSTER).with_devices(2).name == "2 of two hosts"


@pytest.mark.parametrize("devices", [0, -1, 11, 17])
def test_devices_that_do_not_split_evenly_are_refused(devices):
    with pytest.raises(MachineError, match=rf"^{devices} devices asked of 2x8xA100.* 16 .*ask for"):
        preset("2x8xA100").with_devices(devices)


def test_a_machine_file_is_read_with_its_units(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    machine = load_machine(file)
    assert machine.devices == 8
    assert machine.device.memory_bytes == 24 * 2**30
    assert machine.device.efficiency == Efficiency()
    assert machine.levels == (Level("pcie", 4, 25e9, 2.5e-6), Level("ethernet", 2, 3.125e9, 3e-5))


@pytest.mark.parametrize(
    "text, says",
    [
        ("8xMI300", "no preset for 'MI300'; did you mean MI300X? known kinds are H100,"),
        ("H100", "is not [HOSTSx]DEVICESxKIND"),
        ("0xH100", "with at least one of each"),
        ("2x0xH100", "with at least one of each"),
        ("8*H100", "write it as 8xH100, or give"),
        ("12xH100", "a host takes at most 8 H100"),
        ("2x16xH100", "a host takes at most 8 H100"),
    ],
)
def test_a_wrong_preset_says_what_to_write(text, says):
    with pytest.raises(MachineError) as caught:
        preset(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('"900GB/s"', "900", "device.memory_bandwidth is 900, without a unit; write a text such"),
        ('"900GB/s"', '"900"', "device.memory_bandwidth is '900', which has no unit; use one of"),
        ('"900GB/s"', '"900GB"', "which has the unit 'GB'; use one of B/s, kB/s"),
        ('"900GB/s"', '"9e9999GB/s"', "more than can be; write one such as"),
        ('"24GiB"', '"9e999999999999999999GiB"', "more than can be; write one such as"),
        ('"900GB/s"', '"fast"', 'write a number and a unit, as in "900GB/s"'),
        (
            '"25GB/s"',
            '"0GB/s"',
            "level pcie: bandwidth is 0.0; give more than zero, as in '50GB/s'",
        ),
        ("size = 4", "size = 0", "level pcie: size is 0; it must be at least 1"),
        ("size = 4", 'size = "4"', "level pcie: size is '4'; it must be a whole number"),
        ("launch =", "lunch =", "device has the unknown key 'lunch'; remove it or use one of kind"),
        ('kind = "X1"', "", "device has no 'kind'; add it"),
        ("[[level]]", "[[levels]]", "the file has the unknown key 'levels'"),
        ('name = "two hosts"', "name = 3", "name is 3; it must be a text"),
        ('name = "two hosts"', "name = ", "is not TOML"),
        ('float32 = "30TFLOP/s"', "", "device X1 has no compute figure"),
        ("[device.compute]", "efficiency.matmul = 1.5\n[device.compute]", "matmul is 1.5; give a"),
        (
            "[device.compute]",
            "efficiency.memory = [0.5]\n[device.compute]",
            'efficiency.memory has the point 0.5; write pairs, as in ["80GB", 0.5]',
        ),
        (
            "[device.compute]",
            'efficiency.matmul = [["1MFLOP", 0.1], ["2MFLOP", 0.9]]\n[device.compute]',
            "device.efficiency.matmul has 0.9 at 2e+06 after 0.1 at 1e+06: more work would take",
        ),
        (
            "[device]",
            "overlap = 2\n[device]",
            "overlap is 2.0; give a part, at least 0 and at most 1",
        ),
        (
            "[device]",
            "expert_skew = 0.5\n[device]",
            "expert_skew is 0.5; give the rows of the busiest device over the mean, at least 1",
        ),
        (
            "[device]",
            "expert_skew = [2, -1.0]\n[device]",
            "expert_skew is [2.0, -1.0]; give rows of experts, not negative and not all 0",
        ),
        (
            "[device]",
            "arrival_skew = 0.1\n[device]",
            "arrival_skew is 0.1, without a unit; write a text such",
        ),
        (
            "[device]",
            "arrival_skew_power = 0.0\n[device]",
            "arrival_skew_power is 0.0; give more than 0 and at most 1",
        ),
        ("[device]", 'backend = "mpi"\n[device]', "backend 'mpi' is not known; choose one of nccl"),
    ],
)
def test_a_wrong_machine_file_says_what_to_change(tmp_path, old, new, says):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.replace(old, new))
    with pytest.raises(MachineError) as caught:
        load_machine(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_curves_and_kinds_survive_the_trip_through_toml():
    curve = Curve(((1e6, 0.1), (3.5e8, 0.62)))
    device = Device(
        "X1",
        2**34,
        (("float32", 3e13), ("bfloat16", 9e13)),
        9e11,
        5e-6,
        Efficiency(
            matmul=curve, memory=Curve(((4096.0, 1.0), (1e9, 0.7))), functions=curve, pooling=0.125
        ),
    )
    machine = Machine(
        "curved",
        device,
        (Level("pcie", 4, 25e9, 1e-6),),
        arrival_skew_seconds=3.25e-4,
        arrival_skew_power=0.75,
    )
    assert parse_toml(to_toml(machine)) == machine
    assert '["350MFLOP", 0.62]' in to_toml(machine)


def test_of_several_kinds_of_devices_the_worst_figures_count():
    other = """[[device]]
kind = "X2"
memory = "16GiB"
memory_bandwidth = "1200GB/s"
launch = "7us"
compute.float32 = "40TFLOP/s"
compute.bfloat16 = "20TFLOP/s"
efficiency.matmul = [["1MFLOP", 0.1], ["1GFLOP", 0.9]]
efficiency.functions = 0.25

[[level]]
name = "pcie\""""
    text = CLUSTER.replace("[device]", "[[device]]").replace('[[level]]\nname = "pcie"', other, 1)
    device = parse_toml(text).device
    assert (device.kind, device.memory_bytes) == ("X1+X2", 16 * 2**30)
    assert dict(device.flop_per_s) == {"float32": 30e12, "bfloat16": 20e12}
    assert (device.bytes_per_s, device.launch_seconds) == (900e9, 7e-6)
    assert device.efficiency.matmul.at(1e6) == pytest.approx(0.1)
    assert device.efficiency.memory == 1.0
    assert device.efficiency.functions == 0.25  # of the other kind nothing is said
    assert device.efficiency.pooling is None
    assert parse_toml(to_toml(parse_toml(text))).device == device


def test_a_missing_machine_file_is_named():
    with pytest.raises(MachineError, match=r"cannot read machine nowhere\.toml.*give a TOML file"):
        load_machine("nowhere.toml")


@given(st.floats(min_value=1e-12, max_value=1e18))
def test_quantities_read_back_exactly(figure):
    for units in (BANDWIDTH, DURATION):
        assert parse_quantity("figure", quantity(figure, units), units) == figure


@given(
    st.text(max_size=20).map(printable),
    st.floats(1e3, 1e15),
    st.floats(0, 1),
    st.integers(1, 64),
)
def test_any_machine_survives_the_trip_through_toml(text, rate, latency, size):
    device = Device(text, 2**34, (("float32", rate),), rate, latency, Efficiency(memory=0.3))
    level = Level(text, size, rate, latency, gather_bytes_per_s=rate / 3)
    machine = Machine(text, device, (level,), text, "gloo", latency, latency)
    assert parse_toml(to_toml(machine)) == machine


def test_names_do_nothing_to_a_terminal():
    text = to_toml(preset("2xcpu")).replace('"2xcpu"', r'"\u001b[2J"')
    with pytest.raises(MachineError, match=r"name: '\\x1b\[2J' has the control character '\\x1b'"):
        parse_toml(text)
