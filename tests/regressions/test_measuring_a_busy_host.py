"""Measuring a host that other programs keep busy.

`shardwright run --devices 2` and `--machine here` failed on a host with a load of 8 in five of six
tries, with "ZeroDivisionError" or "SVD did not converge", and told the user to ask for fewer
devices. Where ranks wait for each other, what one of them was early is taken off, so that samples
of a busy host come out as zero, and two messages may show no difference. Such samples are left out
now, and a figure that too few are left for is that of a preset: the machine's provenance, its
`[measured]` table and a warning name it, and the host is measured again the next time.
"""

import math
from dataclasses import replace

import pytest

from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.presets import preset
from shardwright.profile import measure
from shardwright.profile.fit import fit_compute, fit_contention, fit_links, fit_overlap, fit_skew
from shardwright.profile.timing import ARRIVAL_SKEW, Sample
from tests.unit.profile.test_fit import device

PRESET = preset("2x2xcpu")
BAD = (0.0, -1e-6, math.nan, math.inf)


def links():
    samples = []
    for tile in (4096.0, 65536.0, 2.0**20):
        samples.append(Sample("host all_reduce", tile, 1e-3 + tile / 1e9))
        samples.append(Sample("host all_gather", tile, 1e-3 + tile / 5e8))
    for kind in ("all_reduce", "all_gather"):
        samples.append(Sample(f"overlap {kind} compute", 2.0**20, 4e-2))
        samples.append(Sample(f"overlap {kind} both", 2.0**20, 4.05e-2))
    samples += [Sample(f"axes {name}", 2.0**20, 1e-3) for name in ("outer", "inner", "both")]
    return samples


@pytest.mark.parametrize("bad", BAD)
def test_one_sample_that_says_nothing_changes_nothing(bad):
    spoilt = [Sample(s.kind, s.work * 3, bad) for s in (*device(), *links())]
    assert fit_compute([*spoilt, *device()]) == fit_compute(device())
    assert fit_links([*spoilt, *links()], "host", 2, True) == fit_links(links(), "host", 2, True)
    found = fit_links(links(), "host", 2, True)
    for kind in ("all_reduce", "all_gather"):
        assert fit_overlap([*spoilt, *links()], found, kind) == fit_overlap(links(), found, kind)
    assert fit_contention([*spoilt, *links()]) == fit_contention(links()) is not None
    waits = [Sample(ARRIVAL_SKEW, 1e-2, 1e-3), Sample(ARRIVAL_SKEW, 4e-2, 2e-3)]
    assert fit_skew([*waits, Sample(ARRIVAL_SKEW, 2e-2, bad)]) == fit_skew(waits)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", sorted({s.kind for s in device()}))
def test_a_kind_without_usable_samples_has_the_figure_of_the_preset(kind, bad):
    samples = [replace(s, seconds=bad) if s.kind == kind else s for s in device()]
    found, known = fit_compute(samples, PRESET.device), PRESET.device
    named = {
        "matmul float32": ("compute.float32", "efficiency.matmul"),
        "matmul float64": (),
        "memory add": (),  # another kernel of the class is left
        "memory relu": (),
        "functions gelu": ("efficiency.functions",),
    }
    one = (kind,) if kind in ("launch", "dispatch", "parameter", "packing") else None
    assert found.assumed == named.get(kind, one or (f"efficiency.{kind}",))
    if kind == "launch":
        assert found.launch_seconds == known.launch_seconds
    if kind == "convolution":
        assert found.efficiency.convolution == known.efficiency.convolution


def test_nothing_usable_gives_the_preset():
    found = fit_compute([replace(s, seconds=0.0) for s in device()], PRESET.device)
    assert dict(found.flop_per_s) == {"float32": PRESET.device.peak_flop_per_s("float32")}
    assert found.bytes_per_s == PRESET.device.bytes_per_s
    assert found.errors == {} and len(found.assumed) == 13
    level = fit_links([], "host", 2, True, PRESET)
    assert (level.bytes_per_s, level.hop_seconds) == (0.8e9, 200e-6)
    assert level.gather_bytes_per_s == 0.5e9
    assert level.assumed == ("host latency", "host bandwidth", "host gather_bandwidth")
    assert fit_overlap([], level, "all_reduce") is None
    assert fit_contention([Sample("axes both", 1.0, 0.0)]) is None


@pytest.mark.parametrize(
    "sizes, seconds",
    [
        ((4096.0,), (1e-3,)),  # one sample of each
        ((4096.0, 4096.0), (1e-3, 2e-3)),  # identical sizes
        ((4096.0, 4096.0, 4096.0), (1e-3, math.nan, 0.0)),
    ],
)
def test_messages_of_one_size_show_no_bandwidth(sizes, seconds):
    samples = [
        Sample(f"host {kind}", *one)
        for kind in ("all_reduce", "all_gather")
        for one in zip(sizes, seconds, strict=True)
    ]
    found = fit_links(samples, "host", 2, True, PRESET)
    assert (found.bytes_per_s, found.gather_bytes_per_s) == (0.8e9, 0.5e9)
    assert "host bandwidth" in found.assumed


def test_large_messages_that_seem_free_show_no_bandwidth():
    flat = [Sample(f"host {kind}", tile, 1e-3) for kind in ("all_reduce", "all_gather")
            for tile in (4096.0, 2.0**20)]  # fmt: skip
    found = fit_links(flat, "host", 2, True, PRESET)
    assert (found.bytes_per_s, found.gather_bytes_per_s) == (0.8e9, 0.5e9)
    assert found.assumed == ("host bandwidth", "host gather_bandwidth")


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks of a host, of which this is one."""
    monkeypatch.setattr(measure.dist, "get_backend", lambda group=None: "gloo")
    monkeypatch.setattr(measure.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure.dist, "broadcast_object_list", lambda found, source: None)


def test_the_machine_names_what_was_not_measured(ranks):
    def machine(samples):
        return measure._machine(samples, {"host": 2}, (2**33, 0, 0), 0.02)

    whole = machine([*device(), *links()])
    assert whole.measured.assumed == () and whole.measured.doubts == ()
    assert "assumed" not in to_toml(whole) + whole.provenance
    silent = ("dispatch", "host all_reduce", "overlap all_gather both")
    part = machine(
        [replace(s, seconds=0.0) if s.kind in silent else s for s in (*device(), *links())]
    )
    assert part.provenance.endswith(
        "; dispatch, host latency, host bandwidth, host gather_bandwidth, overlap of all_gather"
        " assumed as of 2x2xcpu"
    )
    assert part.measured.doubts[0].startswith("too few samples of dispatch, host latency,")
    assert part.measured.doubts[0].endswith("so those figures are of the preset 2x2xcpu")
    assert part.device.dispatch_seconds == PRESET.device.launch_seconds
    assert part.levels[0].bytes_per_s == 0.8e9
    assert parse_toml(to_toml(part)) == part


def test_a_gpu_is_assumed_to_be_as_its_preset():
    assert measure._fallback_preset("NVIDIA A100-SXM4-80GB", 8).name == "2x8xA100"
    assert measure._fallback_preset("NVIDIA H200", 8).device.kind == "H200"
    assert measure._fallback_preset("Some GPU", 8).device.kind == "A100"
    assert measure._fallback_preset("cpu", 4).name == "2x4xcpu"
