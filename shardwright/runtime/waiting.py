"""Waiting for collectives that are on their way, in a frame that says for which."""

from __future__ import annotations

import torch.distributed as dist


def wait_for(work: dist.Work, _what: str) -> None:
    """Wait; of a rank that stands still here `train/watchdog.py` tells what it waits for.

    The wait itself is no Python code of torch's, and so in no frame.
    """
    work.wait()
