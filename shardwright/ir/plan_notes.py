"""Notes on operators of a plan: rules found by experiment, joint splits, opaque modules.

One remark covers the operators of one kind; what they cost depends on the plan and is counted here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.ir.plan import Plan


class RemarkKind(Enum):
    """Why operators are remarked upon."""

    DISCOVERED = "discovered"  # their rule was found by experiment
    STATED = "stated"  # the user stated their rule
    REPLICATED = "replicated"  # they cannot be split: every device computes all of them
    OPAQUE = "opaque"  # sub-modules that are kept whole
    EXPLICIT = "explicit"  # the parts of an operator that was taken apart


_MEANING = {
    RemarkKind.DISCOVERED: "rule found by experiment:",
    RemarkKind.STATED: "rule stated by the user:",
    RemarkKind.REPLICATED: "every device computes all of it:",
    RemarkKind.OPAQUE: "kept whole, so every device computes all of it",
    RemarkKind.EXPLICIT: "",
}


@dataclass(frozen=True, slots=True)
class Remark:
    """Operators that share a remark.

    `what` is their target, or of parts the operator they make; `text` the rule
    or the reason; `ops` their names; `count` how often `what` occurs.
    """

    kind: RemarkKind
    what: str
    text: str
    ops: tuple[str, ...]
    count: int


def costs(plan: Plan, remark: Remark) -> Mapping[str, float]:
    """Seconds of a step, their share of it, and bytes kept for the backward pass, on one rank."""
    names = set(remark.ops)
    own = [op for op in plan.ops if op.name in names]
    seconds = sum(op.seconds for op in own)
    return {
        "seconds": seconds,
        "share": seconds / plan.step_seconds if plan.step_seconds > 0 else 0.0,
        "saved_bytes": sum(op.saved_bytes for op in own),
    }


def lines(plan: Plan, width: int, label: int = 14) -> Iterator[str]:
    """The remarks of a plan as text, one paragraph each."""
    for remark in plan.remarks:
        cost = costs(plan, remark)
        said = " ".join(part for part in (_MEANING[remark.kind], remark.text) if part)
        text = (
            f"{remark.count} x {remark.what}, {cost['seconds'] * 1e3:.2f} ms,"
            f" {cost['share']:.1%} of the step"
        )
        if remark.kind is RemarkKind.EXPLICIT:
            text += f", {cost['saved_bytes'] / 2**20:.2f} MiB saved"
        start = f"  {remark.kind.value:<{label}}"
        yield from textwrap.wrap(
            f"{text}; {said}",
            width,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )


def as_json(plan: Plan) -> list[dict[str, object]]:
    """The remarks with what they cost, for `--json`."""
    return [
        {
            "kind": remark.kind.value,
            "what": remark.what,
            "text": remark.text,
            "count": remark.count,
            **costs(plan, remark),
        }
        for remark in plan.remarks
    ]
