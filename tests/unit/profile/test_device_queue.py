"""Kernels are timed behind others, on a device and with a clock that are made up."""

import time

import pytest

from shardwright.profile.device_queue import QueuedTimer


class Device:
    """A queue whose kernels take what they say; `now` is the host's clock."""

    def __init__(self, monkeypatch):
        self.now = self.done = 0.0  # when the host is, and when the device will have done all
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def enqueue(self, seconds, host):
        self.now += host
        self.done = max(self.done, self.now) + seconds

    def event(self):
        return Place(self)

    def occupy(self, products):
        for _ in range(products):
            self.enqueue(3e-3, 1e-5)

    def synchronize(self):
        self.now = max(self.now, self.done)


class Place:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = max(self.device.now, self.device.done)

    def query(self):
        return self.device.now >= self.at

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize("kernels, seconds", [(1, 2e-6), (1, 1e-2), (400, 3e-6)])
def test_what_the_host_needs_does_not_count(kernels, seconds, monkeypatch):
    """Small kernels took what the host needs to issue them, with a wait after each."""
    device = Device(monkeypatch)

    def run():
        for _ in range(kernels):
            device.enqueue(seconds, 20e-6)

    found = QueuedTimer(device).measure(run, 50)
    assert found.device == pytest.approx(kernels * seconds)
    assert found.host == pytest.approx(kernels * 20e-6)


def test_a_host_that_is_slower_than_at_first_is_put_further_ahead(monkeypatch):
    device, calls = Device(monkeypatch), []

    def run():
        calls.append(0)
        device.enqueue(1e-5, 1e-5 if len(calls) == 1 else 5e-3)

    assert QueuedTimer(device).measure(run, 50).device == pytest.approx(1e-5)
