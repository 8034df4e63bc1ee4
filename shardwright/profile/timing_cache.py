"""Caches timings of single operators in an SQLite database of the user.

A row is for one call (operator, local sizes, dtypes, arguments) on one kind of device, a number of
ranks and threads, and one version of torch (`op_timings.device_key`). A damaged database is
renamed, and the next write creates a new one. If the database is busy or not accessible, timings
are not read or not stored. Each case gives a warning of one line.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

from shardwright.ir.layout import Seconds
from shardwright.machine.calls import Timing

_SCHEMA = """
CREATE TABLE IF NOT EXISTS timings (
    device TEXT NOT NULL, call TEXT NOT NULL, forward REAL, backward REAL,
    measured_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (device, call)
)
"""
_WAIT_SECONDS = 5.0  # the longest wait for another process that writes


@final
class TimingCache:
    """The database in `file`; `warn` is called with a line for each error."""

    def __init__(self, file: Path, warn: Callable[[str], None]) -> None:
        self.file = file
        self._warn = warn

    def find(self, device: str) -> dict[str, Timing | None]:
        """Timings of all calls on `device`, by call; None for calls that cannot run alone."""
        if not self.file.exists():
            return {}
        try:
            with self._open() as database:
                query = "SELECT call, forward, backward FROM timings WHERE device = ?"
                rows = database.execute(query, (device,)).fetchall()
        except sqlite3.OperationalError as e:  # busy, or no permission
            self._warn(f"cannot read the timings of operators in {self.file}: {e}; without them")
            return {}
        except sqlite3.DatabaseError as e:
            self._set_aside(e)
            return {}
        return {call: _timing(call, forward, backward) for call, forward, backward in rows}

    def keep(self, device: str, found: Mapping[str, Timing | None]) -> None:
        """Add or replace timings of calls on `device`."""
        rows = [(device, call, *_columns(timing)) for call, timing in found.items()]
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute(_SCHEMA)
                database.executemany(
                    "INSERT OR REPLACE INTO timings (device, call, forward, backward)"
                    " VALUES (?, ?, ?, ?)",
                    rows,
                )
        except (OSError, sqlite3.OperationalError) as e:
            self._warn(
                f"cannot remember timings of operators in {self.file}: {e}; they are measured again"
                " the next time"
            )
        except sqlite3.DatabaseError as e:
            self._set_aside(e)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        opened = contextlib.closing(sqlite3.connect(self.file, timeout=_WAIT_SECONDS))
        with opened as database, database:  # the inner context commits or rolls back
            yield database

    def _set_aside(self, error: Exception) -> None:
        aside = self.file.with_suffix(".damaged")
        self._warn(f"{self.file} is no database of timings ({error}); it is kept as {aside.name}")
        with contextlib.suppress(OSError):  # the next read finds it damaged again
            self.file.replace(aside)


def _timing(call: str, forward: float | None, backward: float | None) -> Timing | None:
    if forward is None or backward is None:
        return None
    return Timing(call, Seconds(forward), Seconds(backward))


def _columns(timing: Timing | None) -> Iterable[float | None]:
    return (None, None) if timing is None else (timing.forward, timing.backward)
