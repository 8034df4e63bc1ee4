"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

_OLDER = "facfa962"  # a commit whose recomputed layers always gathered again
TITLE = "Giants: plans for 256 GPUs"
_HEAD = (
    *("model", "parameters", "step s", "tokens/s/GPU", "MFU", "GiB", "to spare"),
    *("tp", "ep", "cp", "pp", "wall s", "GiB of the command"),
)


def body(result: dict[str, Any]) -> str:
    """A row for each model, the plans in words, and prices of frameworks' strategies."""
    rows = result["rows"]
    parts = [
        f"`shardwright plan` for {result['preset']}, in bfloat16 with AdamW on parameters in"
        " float32, with an empty cache of captures; the models are those of published"
        " config.json files. A step is of 1,024 x 4,096 tokens unless the model's line says"
        " otherwise. MFU counts useful operations: none of recomputation. Degrees of kinds of"
        " parallelism are products of mesh axes, of which one can have several kinds; 1 is left"
        " out. Seconds of the processor are in brackets.",
        table(list(_HEAD), [_cells(row) for row in rows]),
        f"The plans in words.{_older(rows)}",
        "\n".join(f"* **{row['name']}**: {_said(row)}" for row in rows),
        "A device has 16,384 tokens in a step: gathers of weights hide behind that many, and a plan"
        " that shards all weights sends no tokens. Devices with different experts wait for the"
        " busiest one (`expert_skew`), and stages for each other. gpt-oss computes scores of"
        " attention as its reference code does, because its sinks have no fused kernel in torch."
        + _dense(rows),
        "Beside them, the prices of strategies with the degrees of a framework (`shardwright"
        " price`): of those that were priced the fastest that fits, else the smallest. The"
        " publishers' products in 8 bits are left out, and interleaved schedules unless they are"
        " named. Mixtures are priced too slow: what Megatron-Bridge has measured of Qwen3-235B with"
        " these degrees, in 8 bits, is about as fast as the plan is predicted to be in 16.",
        table(["model", "step s", "of the plan's", "GiB", "strategy", "degrees of"], _others(rows)),
    ]
    return "\n\n".join(parts)


def _older(rows: list[dict[str, Any]]) -> str:
    """A sentence on the rows that were made before recomputed layers could keep copies."""
    names = ", ".join(row["name"] for row in rows if row.get("commit", "").startswith(_OLDER))
    if not names:
        return ""
    return (
        f" Those of {names} were made when plans said `no reshard after forward` also of layers"
        " that gather their parameters again as they are recomputed, and when recomputed layers"
        " gathered them for each micro-batch, whatever a strategy said."
    )


def _dense(rows: list[dict[str, Any]]) -> str:
    """A sentence on the rows whose experts all computed every token when they were planned."""
    every = "compute every token"
    found = [row["name"] for row in rows if every in str((row["planned"] or {}).get("notes", ""))]
    if not found:
        return ""
    return (
        f" In the plan of {', '.join(found)} all experts compute every token, as the code of"
        " transformers says; tokens are sent to chosen experts since."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    found, run = row["planned"], row["command"]
    sizes = "" if row["batch"] == 1024 else f" ({row['batch']:,} x {row['tokens']:,} tokens)"
    head = [row["name"] + sizes, f"{row['parameters'] / 1e9:,.0f} B"]
    spent = ["over the limit", ""] if run is None else [_wall(run), f"{run['peak_gib']:.1f}"]
    if found is None:
        return [*head, *[""] * 9, *spent]
    degrees = [str(n) if n > 1 else "" for n in found["degrees"].values()]
    order = dict(zip(found["degrees"], degrees, strict=True))
    return [
        *head,
        f"{found['seconds']:.1f}",
        f"{found['tokens_per_second']:,.0f}",
        "" if found["utilisation"] is None else f"{found['utilisation']:.0%}",
        f"{found['gib']:.1f}",
        f"{found['room_gib']:.1f}",
        *(order[kind] for kind in ("tp", "ep", "cp", "pp")),
        *spent,
    ]


def _wall(run: dict[str, Any]) -> str:
    return f"{run['wall_seconds']:.0f} ({run['cpu_seconds']:.0f})"


def _said(row: dict[str, Any]) -> str:
    found = row["planned"]
    return "no plan" if found is None else f"{found['verdict']}; {found['headline']}"


def _others(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The fastest strategy that fits of each model; if none does, the smallest."""
    lines = []
    for row in rows:
        priced = {text: one for text, one in row["others"]["priced"].items() if "seconds" in one}
        fitting = {text: one for text, one in priced.items() if one["room_gib"] >= 0}
        if not priced:
            text = next(iter(row["others"]["priced"]))
            figures = ["refused", "", ""]
        elif fitting:
            text = min(fitting, key=lambda text: fitting[text]["seconds"])
            figures = _figures(fitting[text], row["planned"], "")
        else:
            text = min(priced, key=lambda text: priced[text]["gib"])
            figures = _figures(priced[text], row["planned"], " (over)")
        lines.append([row["name"], *figures, f"`{text}`", row["others"]["source"]])
    return lines


def _figures(priced: dict[str, Any], found: dict[str, Any] | None, over: str) -> list[str]:
    times = "" if found is None else f"{priced['seconds'] / found['seconds']:.2f}"
    return [f"{priced['seconds']:.1f}", times, f"{priced['gib']:.1f}{over}"]
