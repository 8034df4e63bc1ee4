"""Section of docs/benchmarks.md on published setups beside the best uniform strategies."""

from __future__ import annotations

from typing import Any

TITLE = "What publishers chose, and the best uniform strategies"
_COLUMNS = ("setup", "", "strategy", "step s", "computed s", "messages s", "GiB")
_ROWS = {"published": "published", "alike": "same degrees", "best": "best"}


def body(result: dict[str, Any]) -> str:
    """A table of the published strategy, the best with its degrees and the best of all."""
    lines = [
        "Prices without simulation, in bf16 with AdamW; the publishers' fp8, asynchronous TP and"
        " interleaved schedules are left out. `same degrees` is the fastest that fits with the"
        " published degrees under any micro-batches, storage and recomputation of layers; `best`"
        " the fastest that fits of all. Of pipelines, seconds of computing and of messages are the"
        " mean over stages. Context parallelism is priced as it runs here: a ring adds up blocks of"
        " scores without a fused kernel.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "| --- | --- | --- " + "| ---: " * 4 + "|",
    ]
    for row in result["rows"]:
        lines += [_line(row, key, said) for key, said in _ROWS.items()]
    lines += ["", *(f"* **{row['title']}**: {_reason(row)}" for row in result["rows"])]
    return "\n".join(lines)


def _line(row: dict[str, Any], key: str, said: str) -> str:
    found = row[key]
    title = row["title"] if key == "published" else ""
    if found is None:
        return f"| {title} | {said} | none fits | | | | |"
    if "refused" in found:
        return f"| {title} | {said} | `{found['strategy']}`: {found['refused']} | | | | |"
    moved = ", ".join(f"{axis} {s:.2f}" for axis, s in found["message_seconds"].items())
    return (
        f"| {title} | {said} | `{found['strategy']}` | {found['seconds']:.2f} |"
        f" {found['compute_seconds']:.2f} | {moved or '0'} | {found['gib']:.1f} |"
    )


def _reason(row: dict[str, Any]) -> str:
    """Why the best strategy is cheaper than the published one, from where the seconds go."""
    best, published, limit = row["best"], row["published"], row["device_gib"]
    source = f"{row['source']}. {row['priced']} of {row['strategies']} strategies were priced."
    if best is None:
        return f"{source} No uniform strategy fits into {limit} GiB."
    if "refused" in published:
        return source
    parts = []
    if published["gib"] > limit:
        parts.append(f"the published one needs {published['gib']:.1f} GiB of {limit}")
    less = published["compute_seconds"] - best["compute_seconds"]
    if abs(less) > 0.05 * published["seconds"]:
        parts.append(f"computing takes {abs(less):.2f} s {'less' if less > 0 else 'more'}")
    moved = [sum(one["message_seconds"].values()) for one in (published, best)]
    if abs(moved[0] - moved[1]) > 0.02 * published["seconds"]:
        word = "less" if moved[0] > moved[1] else "more"
        parts.append(f"messages take {abs(moved[0] - moved[1]):.2f} s {word}")
    waits = [
        one["seconds"] - one["compute_seconds"] - sum(one["message_seconds"].values())
        for one in (published, best)
    ]
    if abs(waits[0] - waits[1]) > 0.05 * published["seconds"]:
        word = "less" if waits[0] > waits[1] else "more"
        parts.append(
            "waits for other stages, and messages inside of operators such as experts, take"
            f" {abs(waits[0] - waits[1]):.2f} s {word}"
        )
    if not parts:
        return source
    return f"{source} Of the best one beside it: {'; '.join(parts)}."
