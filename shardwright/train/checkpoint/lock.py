"""A lock on a folder of checkpoints, which one process holds until it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from shardwright.train.checkpoint.reading import CheckpointError

LOCK = ".lock"


def lock_folder(folder: Path, patience: float) -> None:
    """Lock `folder` for this process, which may lock it repeatedly.

    The lock ends with the process. On a file system without locks nothing is locked.

    Args:
        folder: an existing folder.
        patience: seconds to wait for another process to end, e.g. after a restart.

    Raises:
        CheckpointError: another process has the lock.
        OSError: the folder cannot be written.
    """
    # Never closed: a process loses its POSIX locks of a file when it closes any descriptor of it.
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    end = time.monotonic() + patience
    while not _locked(descriptor):
        if time.monotonic() > end:
            holder = os.read(descriptor, 200).decode("utf-8", "replace").strip()
            os.close(descriptor)
            raise CheckpointError(
                f"{holder or 'another process'} uses {folder} for its checkpoints; end that run, or"
                " give another folder"
            )
        time.sleep(0.1)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EACCES, errno.EAGAIN)
    return True
