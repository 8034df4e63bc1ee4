"""Reads the output of `run --json`: what was predicted of a run, and what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.cli.errors import UsageError
from shardwright.ir.atomic_io import read_text_up_to

_LARGEST = 2**26  # bytes of an output of `run --json`


@dataclass(frozen=True, slots=True)
class RunOutput:
    """Predicted and measured figures of a run.

    Attributes:
        predicted_seconds: of a step.
        measured_seconds: of a step, the median.
        predicted_bytes: peak of a rank; None if unknown.
        measured_bytes: peak of tensors on rank 0; None if it was not measured.
        steps: measured seconds of every step, in order; empty for outputs of older versions.
        setup: the words that say what ran: plan, machine, dtypes, versions.
    """

    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int | None
    measured_bytes: int | None
    steps: tuple[float, ...]
    setup: Mapping[str, str]


def read_run(file: str) -> RunOutput:
    """The figures in a file; raises `UsageError` where it is no output of `run --json`."""
    try:
        data = json.loads(read_text_up_to(file, _LARGEST))
        setup = data.get("setup", {}) if isinstance(data, dict) else data
        if not isinstance(data, dict) or not isinstance(setup, dict):
            raise TypeError(f"a {type(setup).__name__}")
        return RunOutput(
            _positive(data["predicted_step_seconds"]),
            _positive(data["measured_step_seconds"]),
            _bytes(data.get("predicted_peak_bytes")),
            _bytes(data.get("measured_peak_bytes")),
            tuple(map(_positive, data.get("measured_steps", []))),
            {name: _text(setup[name]) for name in setup},
        )
    except OSError as e:
        raise UsageError(f"cannot read {file}: {e.strerror}") from e
    except KeyError as e:
        raise UsageError(f"{file} is not an output of `run --json`: it has no {e}") from e
    except (ValueError, TypeError, RecursionError) as e:
        raise UsageError(f"{file} is not an output of `run --json` ({e!r}); run it again") from e


def _positive(seconds: object) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"a step of {seconds!r} s")
    if not 0 < seconds <= sys.float_info.max:
        raise ValueError(f"a step of {seconds!r} s")
    return float(seconds)


def _bytes(number: object) -> int | None:
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"memory of {number!r} bytes")
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r}, which is no text")
    return value
