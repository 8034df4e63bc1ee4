"""docs/published.md and its pictures, of the committed result and nothing else.

python -m benchmarks.published --page
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.page import table
from benchmarks.published import plots
from benchmarks.published.comparisons import coverage
from benchmarks.published.fit import NOT_FITTED, NOT_FITTED_BECAUSE
from benchmarks.published.row import sources
from benchmarks.published.score import OUTCOMES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "published.md"
_TIMES, _ERRORS = "pictures/published-times.svg", "pictures/published-errors.svg"
_HEAD = """# Scored on published measurements

Predicted step times and memory peaks beside measurements that others have published on GPUs. Each
row of `benchmarks/published/rows` is one measurement with its repository, file, commit and line.
Each is priced as a user's strategy is: the model is captured at full depth, the row's degrees,
schedule and recomputation become a `Strategy`, and `sw.price` predicts on the preset of the GPU.
What cannot be expressed is refused and counted here, not approximated, except for the differences
named below.

Efficiencies, launches and the part of a link that is reached are fitted to a sample of these rows
(`python -m benchmarks.published.fit`); memory is not. So the first table below counts: there a
source is predicted with figures that were fitted to the other sources.

An error is predicted over published, less 1. MAPE is the mean of its absolute value, bias its mean.
Spearman's correlation is that within groups of at least 4 rows of one model, GPU, number of GPUs,
sequence and global batch, averaged over groups. The elements of an activation are tokens of a
micro-batch times width over `tp`: with few of them launches decide, with many the arithmetic.
"""


def pages(result: Path, fitted: Path) -> dict[Path, str]:
    """The page and its pictures, of the scored rows and of the fit."""
    data: dict[str, Any] = json.loads(result.read_text())
    return {
        PAGE: written(data, json.loads(fitted.read_text())),
        DOCS / _TIMES: plots.times(data["points"]),
        DOCS / _ERRORS: plots.errors(data["points"]),
    }


def write(result: Path, fitted: Path) -> None:
    """Write all of them."""
    for path, text in pages(result, fitted).items():
        path.write_text(text)


def written(data: Mapping[str, Any], fitted: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    parts = [
        _HEAD.rstrip(),
        *_held_out(fitted),
        *_overall(data),
        *_rows(data),
        *_splits(data),
        *_intervals(fitted),
        *_memory(data),
        *_differences(data),
        *_origins(data),
        *_left_out("Refused rows", "What has no strategy or no preset yet.", data["unpriced"]),
        *_left_out(
            "Excluded rows",
            "Rows that are no training step which the columns of `Row` say whole.",
            data["excluded"],
        ),
        _origin(data),
    ]
    return "\n\n".join(parts) + "\n"


def _held_out(fitted: Mapping[str, Any]) -> Iterator[str]:
    yield "## Held out, source by source"
    yield (
        "Step times of rows whose features are kept, predicted with figures that were fitted to the"
        " other sources, and with those that were fitted to all. Here kernels and transfers are"
        " added up over arrays (`benchmarks/published/evaluate.py`) and not played as a step"
        f" program. Sources marked * decide nothing: {NOT_FITTED_BECAUSE}. `issue` is the geometric"
        " mean of a guess and of samples of hosts: sources whose steps depend on it, and an own"
        " measurement (`benchmarks/gpu`), as hosts differ by several times. Rows with compilation,"
        " fp8 or `zero=1` are not among them, and those that recompute by operators count half of"
        " the products again."
    )
    held, within = fitted["held_out"], fitted["fitted"]
    rows = [
        [
            f"{source}{'*' * (source in NOT_FITTED)}",
            str(one["rows"]),
            _percent(one["mape"]),
            _signed(one["bias"]),
            _percent(within[source]["mape"]),
        ]
        for source, one in held.items()
    ]
    rows.append(
        [
            "mean of sources",
            "",
            _percent(fmean(one["mape"] for one in held.values())),
            "",
            _percent(fmean(one["mape"] for one in within.values())),
        ]
    )
    yield table(["source", "rows", "held-out MAPE", "bias", "fitted MAPE"], rows)
    yield "The figures, and what they are without each source:"
    names = list(fitted["figures"])
    yield table(
        ["figure", "all", *fitted["without"]],
        [
            [name, f"{fitted['figures'][name]:g}"]
            + [f"{one[name]:g}" for one in fitted["without"].values()]
            for name in names
        ],
    )


def _overall(data: Mapping[str, Any]) -> Iterator[str]:
    found = data["overall"]
    untried = sum(count["untried"] for count in data["counts"].values())
    yield "## Priced with the presets"
    lines = [
        f"* Step time, averaged over sources ({found['sources']}) and not over their"
        f" {found['rows']} rows: MAPE {_percent(found['mape'])}, bias {_signed(found['bias'])}"
        " (asked: 8 %, no source over 15 %).",
        f"* Order within groups: Spearman {_number(found['spearman'])} (asked: 0.95).",
    ]
    left = sum(count["excluded"] + count["unpriced"] for count in data["counts"].values())
    read = sum(count["read"] for count in data["counts"].values())
    lines.append(
        f"* Excluded or refused: {left} of {read} rows, by source below (asked: at most 5 % of a"
        " source's rows)."
    )
    if untried:
        lines.append(
            f"* {untried} rows are not priced: those that are, are a sample over sources, models"
            " and degrees (`benchmarks/published/sample.py`), drawn before any was priced."
        )
    yield "\n".join(lines)
    yield f"![Predicted against published seconds of a step, by source]({_TIMES})"
    yield f"![Predicted over published seconds by the number of parameters]({_ERRORS})"


def _rows(data: Mapping[str, Any]) -> Iterator[str]:
    yield "## Rows"
    yield table(
        ["source", "read", "excluded", "refused", "priced", "not yet priced"],
        [[name, *(str(count[what]) for what in _COUNTS)] for name, count in data["counts"].items()],
    )


_TITLES = {"gpu": "GPU", "elements": "elements of an activation"}
_COUNTS = ("read", "excluded", "unpriced", "priced", "untried")


def _splits(data: Mapping[str, Any]) -> Iterator[str]:
    for name, groups in data["by"].items():
        title = _TITLES.get(name, name)
        yield f"## Step time by {title}"
        yield table(
            [
                title,
                "rows",
                "sources",
                "MAPE",
                "median",
                "90 % below",
                "bias",
                "Spearman",
            ],
            [
                [
                    group,
                    str(one["rows"]),
                    str(one["sources"]),
                    _percent(one["mape"]),
                    _percent(one["median"]),
                    _percent(one["p90"]),
                    _signed(one["bias"]),
                    _number(one["spearman"]),
                ]
                for group, one in groups.items()
            ],
        )


def _memory(data: Mapping[str, Any]) -> Iterator[str]:
    yield "## Memory"
    yield (
        "Peaks of rows that have published one, without the context of the driver. What torch's"
        " allocator has *reserved* is simulated from the requests of two steps, the second with the"
        " optimizer's state; streams of gathers, which have memory of their own, are not."
    )
    lines = []
    for kind, asked in (("allocated", 3), ("reserved", 6)):
        known = [one["mape"] for name, one in data["memory"].items() if name.endswith(kind)]
        if known:
            lines.append(
                f"* What is {kind}: MAPE {_percent(fmean(known))}, the mean of {len(known)} sources"
                f" (asked: {asked} %)."
            )
    yield "\n".join(lines)
    yield table(
        ["source and kind", "rows", "MAPE", "bias"],
        [
            [name, str(one["rows"]), _percent(one["mape"]), _signed(one["bias"])]
            for name, one in data["memory"].items()
        ],
    )
    yield "## Verdicts"
    yield (
        "What users are told of the predicted peak and of what the preset says a device gives to"
        " torch, against what happened. *Try it* is said within the error of published peaks of"
        " the other sources. A peak far below the memory of a device is that of the cost tables."
    )
    yield "\n".join(_shares(data["verdicts"].values()))
    yield table(
        ["source", *OUTCOMES],
        [[name, *(str(one[n]) for n in OUTCOMES)] for name, one in data["verdicts"].items()],
    )


def _shares(counts: Iterable[Mapping[str, int]]) -> Iterator[str]:
    """The shares of wrong verdicts and of doubtful ones, over all rows."""
    total = Counter[str]()
    for one in counts:
        total.update(one)
    ran = sum(total[name] for name in OUTCOMES if name.startswith("ran,"))
    every = sum(total.values())
    wrong, doubtful = total["ran out, fits"], total["ran, try it"] + total["ran out, try it"]
    yield f"* False *fits*: {wrong} of {every - ran} rows that ran out of memory (asked: none)."
    refused = total["ran, does not fit"]
    yield (
        f"* False *does not fit*: {refused} of {ran} rows that ran, {_percent(refused / ran)}"
        " (asked: at most 5 %)."
    )
    yield f"* *Try it*: {doubtful} rows, {_percent(doubtful / every)} (asked: at most a tenth)."


def _intervals(fitted: Mapping[str, Any]) -> Iterator[str]:
    yield "## Intervals"
    yield (
        "How many rows of a source are in the interval that the *other* sources give, all predicted"
        " without their own source: what users see beside a time (asked: 85 to 95 %). It is that of"
        " nine of ten rows on the same kind of GPU, widened by the factor with which nine of ten"
        " rows of each of those sources are in the interval of the rest. A source is not compared"
        " on a kind of GPU of which the others have too few rows."
    )
    found = coverage(fitted)
    parts = [one["inside"] / one["compared"] for one in found.values() if one["compared"]]
    rows = [
        [
            source,
            *(f"{one[name]:.3g}" for name in ("rows", "compared", "widened", "inside")),
            _percent(one["inside"] / one["compared"]) if one["compared"] else "-",
        ]
        for source, one in found.items()
    ]
    rows.append(["mean of sources", *[""] * 4, _percent(fmean(parts)) if parts else "-"])
    yield table(["source", "rows", "compared", "widened by", "in the interval", "coverage"], rows)


def _differences(data: Mapping[str, Any]) -> Iterator[str]:
    yield "## Differences that are priced"
    yield "Ways in which the priced step is not the published one, the same for all sources."
    rows = [[name, str(count)] for name, count in data["approximated"].items()]
    yield table(["difference", "rows"], rows)


def _origins(data: Mapping[str, Any]) -> Iterator[str]:
    yield "## Sources and assumptions"
    lines = []
    for key, source in sources().items():
        said = "; ".join(source["assumptions"])
        lines.append(f"* **{key}**: `{source['repository']}` ({source['license']}). {said}.")
    yield "\n".join(lines)


def _left_out(title: str, text: str, by: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield f"## {title}"
    yield text
    yield table(
        ["source: reason", "rows"],
        [
            [f"{source}: {reason}", str(count)]
            for source, reasons in by.items()
            for reason, count in reasons.items()
        ],
    )


def _origin(data: Mapping[str, Any]) -> str:
    return (
        f"`{data['command']}`, {data['date']}, at commit {data['commit'][:7]}:"
        f" `benchmarks/published/result.json`. Predictions by the code with hash"
        f" `{data['code'][:16]}`."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
