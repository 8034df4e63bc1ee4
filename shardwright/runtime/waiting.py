"""Waiting for collectives that are on their way, in a frame that says for which."""

from __future__ import annotations

from typing import Protocol


class Waited(Protocol):
    """A collective that is on its way."""

    def wait(self) -> object:
        """Until it is done."""


def wait_for(work: Waited, _what: str) -> None:
    """Wait; of a rank that stands still here `train/watchdog.py` tells what it waits for.

    The wait itself is no Python code of torch's, and so in no frame.
    """
    work.wait()
