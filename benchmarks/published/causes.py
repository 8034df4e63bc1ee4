"""Residuals by cause: classes of rows whose steps are predicted wrong for a reason of their own.

A row belongs to the first class that takes it, and what no class takes is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.page import table
from benchmarks.published.row import Row


@dataclass(frozen=True, slots=True)
class Cause:
    """A class of rows.

    Attributes:
        name: of the class.
        takes: whether a row belongs to it.
        known: what is known of its errors, what was tried, and what would be needed.
    """

    name: str
    takes: Callable[[Row], bool]
    known: str


CAUSES = (
    Cause(
        "steps of tests, paced by hosts",
        lambda row: row.source == "megatron-lm",
        "Tiny models with deterministic kernels, whose iterations log, check and synchronize for"
        " most of their time ([above](#steps-that-their-hosts-pace)). Tried: a figure of the host"
        " for each kernel and transfer. Needed: the fixed part of an iteration, published by one"
        " source and scored on another.",
    ),
    Cause(
        "mixtures of experts",
        lambda row: row.experts > 0,
        "Frameworks put rows in order by one kernel and send tokens from within it. Tried: tokens"
        " once to each host, routers that limit groups, and an exact count of kernels and calls."
        " Needed: times of a dispatch by tokens and devices, and columns of a row that say which"
        " one ran.",
    ),
    Cause(
        "rings of torch",
        lambda row: row.source == "torchtitan" and row.cp > 1,
        "torch's attention over a split sequence, of December 2024, on up to 262,144 tokens. Tried"
        " by hand: rings that share causal work unevenly would bring these steps within a tenth,"
        " but the source does not say that its load was not balanced; lower rates of attention do"
        " not fit two and eight ranks together. Needed: the timeline of one such step.",
    ),
    Cause(
        "pipelines of torchtitan",
        lambda row: row.source == "torchtitan" and row.pp > 1,
        "Llama-405B in eight stages takes half as long again as predicted, also where stages are"
        " interleaved. Tried: parameters gathered for each micro-batch, which hides it, and that is"
        " not what ran. Needed: the timeline of one such step.",
    ),
    Cause(
        "asynchronous tensor parallelism",
        lambda row: row.async_tp,
        "Chunks of products are less efficient than whole ones, and copies take bandwidth of"
        " memory. Needed: both by size.",
    ),
    Cause(
        "products in 8 bits",
        lambda row: row.precision.startswith("fp8"),
        "Dense models with casts and recipes of several releases.",
    ),
    Cause("everything else", lambda row: True, "Dense models in 16 bits."),
)


def cause_of(row: Row) -> str:
    """The name of the first class that takes the row."""
    return next(cause.name for cause in CAUSES if cause.takes(row))


def section(data: Mapping[str, Any], percent: Callable[[float], str]) -> Iterator[str]:
    """The section of the page; `percent` writes a number."""
    found = data["causes"]
    yield "## Residuals by cause"
    yield "Rows by the first of these classes that takes them, and what their errors come from."
    yield table(
        ["rows of", "rows", "MAPE", "bias", "what is known"],
        [
            [
                cause.name,
                str(found[cause.name]["rows"]),
                percent(found[cause.name]["mape"]),
                f"{100 * found[cause.name]['bias']:+.1f} %",
                cause.known,
            ]
            for cause in CAUSES
            if cause.name in found
        ],
    )
