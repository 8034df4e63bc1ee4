"""The newest values are computed next, one call at a time, and results are kept."""

import threading
import time

from shardwright.cli.errors import UsageError
from shardwright.cli.explore.background import Background

PATIENCE = 60.0


def test_values_replaced_before_their_turn_are_not_computed():
    calls, begun, go_on = [], threading.Event(), threading.Event()

    def find(values):
        calls.append(values["devices"])
        begun.set()
        assert go_on.wait(PATIENCE)
        return values["devices"] * 10

    plans = Background(find)
    assert plans.ask({"devices": 1}) is None
    assert begun.wait(PATIENCE)
    for devices in (2, 3, 1, 4):  # 1 is asked for again while it is computed
        assert plans.ask({"devices": devices}) is None
    go_on.set()
    assert plans.ask({"devices": 4}, PATIENCE).found == 40
    assert plans.ask({"devices": 1}).found == 10
    time.sleep(0.05)
    assert calls == [1, 4]


def test_errors_are_one_line_and_end_nothing():
    errors = {1: UsageError("too\nfew devices"), 2: ZeroDivisionError("by zero")}

    def find(values):
        if values["devices"] in errors:
            raise errors[values["devices"]]
        return "found"

    plans = Background(find)
    texts = [plans.ask({"devices": n}, PATIENCE).error for n in (1, 2)]
    assert texts == ["too few devices", "ZeroDivisionError: by zero"]
    assert plans.ask({"devices": 3}, PATIENCE).found == "found"
