"""Renders the notes on a plan's operators as text and JSON, with the costs of these operators."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from shardwright.ir.plan import Plan, Remark, RemarkKind

_MEANING = {
    RemarkKind.DISCOVERED: "rule found by experiment:",
    RemarkKind.STATED: "rule stated by the user:",
    RemarkKind.REPLICATED: "every device computes all of it:",
    RemarkKind.OPAQUE: "kept whole, so every device computes all of it",
    RemarkKind.EXPLICIT: "",
}


def costs(plan: Plan, remark: Remark) -> Mapping[str, float]:
    """Seconds of a step, their share of it, and bytes saved for the backward pass, on one rank."""
    names = set(remark.ops)
    own = [op for op in plan.ops if op.name in names]
    seconds = sum(op.seconds for op in own)
    return {
        "seconds": seconds,
        "share": seconds / plan.step_seconds if plan.step_seconds > 0 else 0.0,
        "saved_bytes": sum(op.saved_bytes for op in own),
    }


def lines(plan: Plan, width: int) -> Iterator[str]:
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
        start = f"  {remark.kind.value:<14}"
        yield from textwrap.wrap(
            f"{text}; {said}",
            width,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )


def short(plan: Plan) -> Iterator[str]:
    """One sentence about each kind of remarks, with its share of the step."""
    by_kind: dict[RemarkKind, list[Remark]] = {}
    for remark in plan.remarks:
        by_kind.setdefault(remark.kind, []).append(remark)
    for kind, found in by_kind.items():
        count = sum(remark.count for remark in found)
        share = sum(costs(plan, remark)["share"] for remark in found)
        yield f"{kind.value}: {count} operators, {share:.1%} of the step (--all, explain)"


def as_json(plan: Plan) -> list[dict[str, object]]:
    """The remarks with their costs, for `--json`."""
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
