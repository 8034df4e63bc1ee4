"""Fields of a strategy that are on or off, and what others they need to be on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.ir.options.fp8 import GATHERABLE

Fields = Mapping[str, Any]  # all fields of a strategy by name


def _of_gathers(given: Fields) -> str:
    if given["fp8"] not in GATHERABLE:
        return f"fp8={' or fp8='.join(GATHERABLE)}, whose weights have one scale each"
    if given["zero"] == 0 or given["dp_shard"] == given["cp"] == 1:
        return "sharded parameters, so dp_shard=2 or more and zero=1 or more"
    return ""


def _of_async_tp(given: Fields) -> str:
    if given["tp"] == 1:
        return "tp=2 or more, whose messages it hides"
    return "" if given["sequence_parallel"] else "sp=on, whose gathers and scattered sums it hides"


NEEDS: Mapping[str, Callable[[Fields], str]] = {
    "fp8_gather": _of_gathers,
    "async_tp": _of_async_tp,
}


def lacking(given: Fields) -> dict[str, str]:
    """The fields that are on, each with what it needs and does not have; without those that do."""
    found = {name: needs(given) for name, needs in NEEDS.items() if given[name] is True}
    return {name: missing for name, missing in found.items() if missing}
