"""Samples of a made-up machine give its figures back."""

import random

import pytest

from shardwright.machine.efficiency_curve import Curve, CurveError
from shardwright.machine.presets import preset
from shardwright.profile.fit import (
    LinkFigures,
    fit_compute,
    fit_contention,
    fit_links,
    fit_overlap,
    fit_skew,
)
from shardwright.profile.timing import ARRIVAL_SKEW, Sample

LAUNCH, PEAK, BANDWIDTH = 5e-6, 100e9, 20e9
DISPATCH, PARAMETER, PACKING = 25e-6, 40e-6, 15e-6
CURVE = Curve(((1e6, 0.2), (1e8, 0.8), (1e10, 1.0)))
CACHED = Curve(((1e5, 1.0), (1e8, 0.25)))


def kernels(kind, count, works, peak, curve):
    return [Sample(kind, count * w, count * (LAUNCH + w / (peak * curve.at(w)))) for w in works]


def device():
    samples = kernels("matmul float32", 3, (1e6, 1e7, 1e8, 1e10), PEAK, CURVE)
    samples += kernels("matmul float64", 3, (1e8, 1e10), PEAK / 2, CURVE)
    samples += kernels("convolution", 3, (1e8, 1e10), PEAK, Curve(((1.0, 0.5),)))
    samples += kernels("attention", 2, (1e8, 1e10), PEAK, Curve(((1.0, 0.25),)))
    samples += kernels("memory add", 1, (1e6, 1e8), BANDWIDTH, CACHED)
    samples += kernels("memory relu", 1, (1e6, 1e8), BANDWIDTH, CACHED)
    samples += kernels("functions gelu", 1, (1e6, 1e8), BANDWIDTH / 8, CACHED)
    samples += kernels("pooling", 1, (1e6, 1e8), BANDWIDTH / 16, CACHED)
    samples += [Sample("update", w, 8 * DISPATCH + w / BANDWIDTH) for w in (1e6, 1e8)]
    samples += [Sample("launch", 200, 200 * LAUNCH), Sample("dispatch", 128, 128 * DISPATCH)]
    samples += [Sample("parameter", 16, 16 * PARAMETER), Sample("packing", 48, 48 * PACKING)]
    return samples


def test_the_part_of_the_host_is_a_figure_of_devices_beside_it():
    gpu = preset("1xA100").device
    measured = fit_compute([*device(), Sample("issue", 100, 100 * 20e-6)], gpu)
    assert measured.issue_seconds == pytest.approx(20e-6)
    assert "issue" not in measured.assumed
    guessed = fit_compute(device(), gpu)
    assert guessed.issue_seconds == pytest.approx(gpu.issue_seconds)
    assert "issue" in guessed.assumed
    assert fit_compute(device()).issue_seconds == 0.0 and not fit_compute(device()).assumed


def test_a_device_is_found_again():
    found = fit_compute(device())
    assert dict(found.flop_per_s) == pytest.approx({"float32": PEAK, "float64": PEAK / 2}, rel=1e-3)
    assert found.launch_seconds == pytest.approx(LAUNCH)
    assert found.dispatch_seconds == pytest.approx(DISPATCH)
    assert found.parameter_seconds == pytest.approx(PARAMETER)
    assert found.packing_seconds == pytest.approx(PACKING)
    assert found.efficiency.update.at(1e8) == pytest.approx(1.0, rel=1e-3)
    matmul = found.efficiency.matmul
    for work, part in CURVE.points[1:]:
        assert matmul.at(work) == pytest.approx(part, rel=1e-3)
    assert found.efficiency.convolution.last == pytest.approx(0.5, rel=1e-3)
    assert found.efficiency.attention.last == pytest.approx(0.25, rel=1e-3)
    reached = found.bytes_per_s * found.efficiency.streaming
    assert reached == pytest.approx(0.25 * BANDWIDTH, rel=1e-3)
    slow = found.efficiency.functions.last, found.efficiency.pooling.last
    assert slow == pytest.approx((0.25 / 8, 0.25 / 16), rel=1e-3)
    assert all(most < 0.01 for _, most in found.errors.values())


def test_a_peak_is_what_the_best_class_reaches():
    samples = [s for s in device() if s.kind != "convolution"]
    samples += kernels("convolution", 3, (1e8, 1e10), 1.25 * PEAK, Curve(((1.0, 1.0),)))
    found = fit_compute(samples)
    assert dict(found.flop_per_s)["float32"] == pytest.approx(1.25 * PEAK, rel=1e-3)
    for dtype, peak in (("float32", PEAK), ("float64", PEAK / 2)):
        reached = dict(found.flop_per_s)[dtype] * found.efficiency.matmul.last
        assert reached == pytest.approx(peak, rel=1e-3)
    assert found.efficiency.convolution.last == pytest.approx(1.0, rel=1e-3)


def test_curves_are_those_of_the_dtype_that_is_trained_in():
    """On a GPU: of bfloat16, whose products need more work to be fast than those of float32."""
    samples = [s for s in device() if s.kind != "convolution" and s.kind != "attention"]
    narrow = Curve(((1e8, 0.1), (1e10, 1.0)))
    samples += kernels("matmul bfloat16", 3, (1e8, 1e10), 16 * PEAK, narrow)
    samples += kernels("convolution", 3, (1e8, 1e10), 16 * PEAK, Curve(((1.0, 0.5),)))
    samples += kernels("attention", 2, (1e8, 1e10), 16 * PEAK, Curve(((1.0, 0.25),)))
    found = fit_compute(samples)
    peaks = {"float32": PEAK, "float64": PEAK / 2, "bfloat16": 16 * PEAK}
    assert dict(found.flop_per_s) == pytest.approx(peaks, rel=1e-3)
    assert found.efficiency.matmul.at(1e8) == pytest.approx(0.1, rel=1e-3)
    assert found.efficiency.convolution.last == pytest.approx(0.5, rel=1e-3)
    assert found.efficiency.attention.last == pytest.approx(0.25, rel=1e-3)


def test_a_fit_says_how_far_off_it_is():
    samples = [
        Sample(s.kind, s.work, s.seconds * (2 if s.kind == "memory relu" else 1)) for s in device()
    ]
    middle, most = fit_compute(samples).errors["memory"]
    assert 0.2 < middle <= most < 0.6
    assert fit_compute(samples).errors["matmul"][1] < 0.01


def test_what_is_little_but_launches_is_no_point_of_a_curve():
    tiny = Sample("memory add", 100.0, LAUNCH * 1.0001)
    found = fit_compute([*device(), tiny])
    assert found.efficiency.memory == fit_compute(device()).efficiency.memory


@pytest.mark.parametrize("ranks, terms", [(2, True), (4, True), (8, False)])
def test_a_level_is_found_again_under_noise(ranks, terms):
    call, hop, reduced, gathered = 8e-4, 5e-5, 1e9, 4e8
    noise = random.Random(0)
    samples = []
    for tile in (4096, 65536, 2**20, 2**23):
        laps = ranks - 1
        reduce = call + 2 * laps * hop + 2 * laps / ranks * tile / reduced
        seconds = {
            "all_reduce": reduce,
            "all_gather": call + laps * hop + laps * tile / gathered,
            "reduce_scatter": call
            + laps * hop
            + laps / ranks * tile / (gathered if terms else reduced),
        }
        samples += [
            Sample(f"host {kind}", tile, s * noise.uniform(0.99, 1.01))
            for kind, s in seconds.items()
        ]
    found = fit_links(samples, "host", ranks, terms)
    assert found.bytes_per_s == pytest.approx(reduced, rel=0.05)
    assert found.gather_bytes_per_s == pytest.approx(gathered, rel=0.05)
    lap = found.launch_seconds + (ranks - 1) * found.hop_seconds
    assert lap == pytest.approx(call + (ranks - 1) * hop, rel=0.05)
    assert set(found.errors) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(most < 0.05 for _, most in found.errors.values())


def test_a_link_that_lets_bursts_pass_has_the_bandwidth_that_lasts():
    call, rate, burst = 8e-4, 1.25e8, 2.5e5
    samples = []
    for tile in (4096, 65536, 2**20, 2**23):
        for kind in ("all_reduce", "all_gather"):  # both send a tile, on two ranks
            samples.append(
                Sample(f"link {kind}", tile, call + max(tile / 1e10, (tile - burst) / rate))
            )
    found = fit_links(samples, "link", 2, receives_terms=True)
    assert found.bytes_per_s == pytest.approx(rate, rel=0.01)
    assert found.gather_bytes_per_s == pytest.approx(rate, rel=0.01)
    assert found.launch_seconds + found.hop_seconds == pytest.approx(call, rel=0.4)


def test_latency_that_only_noise_shows_is_none():
    samples = [Sample(f"host {kind}", 4096.0, 1e-3) for kind in ("all_reduce", "all_gather")]
    samples += [Sample("host all_reduce", 2**20, 2e-3), Sample("host all_gather", 2**20, 3e-3)]
    found = fit_links(samples, "host", 2, receives_terms=True)
    assert min(found.launch_seconds, found.hop_seconds) >= 0
    assert found.bytes_per_s > 0 and found.gather_bytes_per_s > 0


@pytest.mark.parametrize("shown, part", [(2.0, 0.0), (1.0, 0.5), (0.0, 1.0), (3.0, 0.0), (-1, 1.0)])
@pytest.mark.parametrize("kind, tile", [("all_reduce", 2e6), ("all_gather", 1e6)])
def test_what_computing_takes_longer_is_not_hidden_of_what_plans_are_charged(
    shown, part, kind, tile
):
    links = LinkFigures(2, False, 0.5, 0.5, 4e6, 1e6, {})
    samples = []
    for off in (-0.75, 0.75):  # which the mean of several tells
        samples.append(Sample(f"overlap {kind} compute", tile, 5.0 + off))
        samples.append(Sample(f"overlap {kind} both", tile, 5.0 - off + shown))
    assert links.seconds(kind, tile) == pytest.approx(2.0)
    assert fit_overlap(samples, links, kind) == pytest.approx(part)


@pytest.mark.parametrize(
    "points, says",
    [
        ((), "no points"),
        (((1.0, 0.0),), "give a part, more than 0"),
        (((1.0, 1.5),), "at most 1"),
        (((0.0, 0.5),), "give more than zero"),
        (((2.0, 0.5), (1.0, 0.5)), "in order of their work"),
        (((1.0, 0.1), (2.0, 0.5)), "more work would take less time"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(points, says):
    with pytest.raises(CurveError, match=says):
        Curve(points)


@pytest.mark.parametrize(
    "both, expected", [(2.0, 0.0), (2.5, 0.5), (3.0, 1.0), (4.0, 1.0), (1.9, 0.0)]
)
def test_two_axes_contend_by_what_both_at_once_take_longer(both, expected):
    times = {"outer": 2.0, "inner": 1.0, "both": both}
    samples = [Sample(f"axes {name}", 1.0, seconds) for name, seconds in times.items()]
    assert fit_contention(samples) == pytest.approx(expected)
    assert fit_contention([]) == 1.0  # of a prime number of ranks nothing is known


@pytest.mark.parametrize("power", [0.5, 0.8, 1.0])
def test_ranks_drift_apart_with_a_power_of_the_time(power):
    waits = [Sample(ARRIVAL_SKEW, s, 4e-4 * (s / 10e-3) ** power) for s in (1e-3, 4e-3, 64e-3)]
    found = fit_skew([*waits, Sample("host all_reduce", 4096.0, 1e-3)])
    assert found == pytest.approx((4e-4, power))


def test_ranks_drift_apart_no_slower_than_by_chance_and_no_faster_than_one_that_is_slow():
    for power, kept in ((0.1, 0.5), (1.7, 1.0)):
        waits = [Sample(ARRIVAL_SKEW, s, 4e-4 * (s / 10e-3) ** power) for s in (5e-3, 10e-3, 20e-3)]
        assert fit_skew(waits) == pytest.approx((4e-4, kept))


def test_where_little_is_known_of_drift_it_is_by_chance_or_none():
    assert fit_skew([Sample(ARRIVAL_SKEW, 40e-3, 2e-3)]) == pytest.approx((1e-3, 0.5))
    assert fit_skew([Sample("host all_reduce", 4096.0, 1e-3)]) == (0.0, 0.5)
    assert fit_skew([Sample(ARRIVAL_SKEW, 4e-3, 0.0)]) == (0.0, 0.5)
