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
from benchmarks.published import causes, plots
from benchmarks.published.comparisons import coverage, held_out
from benchmarks.published.fit import NOT_FITTED, NOT_FITTED_BECAUSE
from benchmarks.published.row import read, sources
from benchmarks.published.score import OUTCOMES, commits
from shardwright.machine.fitted import OVERLAP

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


def pages(result: Path, fitted: Path, own: Path, hidden: Path) -> dict[Path, str]:
    """The page and its pictures, of the scored rows, the fit, the own rows and hidden parts."""
    data: dict[str, Any] = json.loads(result.read_text())
    return {
        PAGE: written(data, *(json.loads(file.read_text()) for file in (fitted, own, hidden))),
        DOCS / _TIMES: plots.times(data["points"]),
        DOCS / _ERRORS: plots.errors(data["points"]),
    }


def write(result: Path, fitted: Path, own: Path, hidden: Path) -> None:
    """Write all of them."""
    for path, text in pages(result, fitted, own, hidden).items():
        path.write_text(text)


def written(
    data: Mapping[str, Any],
    fitted: Mapping[str, Any],
    own: Mapping[str, Any],
    hidden: Mapping[str, Any],
) -> str:
    """The page, in Markdown."""
    parts = [
        _HEAD.rstrip(),
        *_held_out(fitted),
        *_hidden(hidden),
        *_hosts(fitted),
        *_overall(data),
        *_rows(data),
        *causes.section(data, _percent),
        *_splits(data),
        *_own(own),
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
        _origin(data, "result.json"),
        *commits(data),
    ]
    return "\n\n".join(parts) + "\n"


def _held_out(fitted: Mapping[str, Any]) -> Iterator[str]:
    held, within = fitted["held_out"], fitted["fitted"]
    yield "## Held out, source by source"
    yield (
        "Step times of rows whose features are kept, predicted with figures that were fitted to the"
        " other sources, and with those that were fitted to all. Here kernels and transfers are"
        " added up over arrays (`benchmarks/published/evaluate.py`) and not played as a step"
        f" program. Sources marked * decide nothing: {NOT_FITTED_BECAUSE}. `issue` is the geometric"
        " mean of a guess and of samples of hosts: sources whose steps depend on it, and an own"
        " measurement (`benchmarks/gpu`), as hosts differ by several times. Rows with compilation,"
        " fp8 or `zero=1` are not among them, and those that recompute by operators count half of"
        " the products again. *Host* is the part of one per cent by which steps get slower if hosts"
        " issue kernels one per cent slower, by these figures."
    )
    rows = [
        [
            f"{source}{'*' * (source in NOT_FITTED)}",
            str(one["rows"]),
            _percent(one["mape"]),
            _signed(one["bias"]),
            _percent(within[source]["mape"]),
            _percent(fmean(row["host"] for row in fitted["rows"] if row["source"] == source)),
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
            "",
        ]
    )
    yield table(["source", "rows", "held-out MAPE", "bias", "fitted MAPE", "host"], rows)
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


def _hidden(hidden: Mapping[str, Any]) -> Iterator[str]:
    yield "## The part of messages that operators hide"
    yield (
        f"Presets hide {OVERLAP:g} of gathers of parameters and of sums of their gradients"
        " (`overlap`). Mean errors of rows that shard parameters or gradients, by that part, with"
        " the other figures of presets (`python -m benchmarks.published.overlap`); bias in"
        " brackets. *Refitted* are means with figures that were fitted to these rows for each part."
        " Kernels and transfers are added up as above."
    )
    sources = list(hidden["parts"][0]["sources"])
    rows = [
        [f"{one['overlap']:g}", _percent(one["mape"]), _percent(one["refitted"])]
        + [
            f"{_percent(one['sources'][name]['mape'])} ({_signed(one['sources'][name]['bias'])})"
            for name in sources
        ]
        for one in hidden["parts"]
    ]
    counts = hidden["parts"][0]["sources"]
    names = [f"{name}, {counts[name]['rows']} rows" for name in sources]
    yield table(["overlap", "mean of sources", "refitted", *names], rows)


def _hosts(fitted: Mapping[str, Any]) -> Iterator[str]:
    yield "## Steps that their hosts pace"
    yield (
        f"Rows of {', '.join(NOT_FITTED)} by GPU: the median of predicted over published, and"
        " microseconds of a step for each kernel that a rank launches, as published over as counted"
        f" here; the preset's host needs {fitted['figures']['issue']:g} for each. Then what a step"
        " takes by least squares over the group's own rows: a fixed part, one for each kernel, one"
        " for each transfer of activations, and the mean error that is left. No prediction uses"
        " these: a figure that is fitted to one source and then scored on it says nothing. A newer"
        " GPU is not faster in proportion, and the same tests take several times as long on hosts"
        " with four GPUs. What predictions lack here is the fixed part, of an iteration that logs,"
        " checks and synchronizes around a step of a few milliseconds on the device, and hosts that"
        " are slower; no measurement of either is published. `shardwright profile` measures `issue`"
        " of a host; a fixed part of an iteration has no figure in a machine file."
    )
    yield table(
        [
            *("GPUs", "rows", "predicted", "us a kernel"),
            *("fixed, ms", "kernel, us", "transfer, us", "error left"),
        ],
        [
            [one["gpus"], str(one["rows"]), f"{one['predicted']:.2f}", f"{one['kernels']:.0f}"]
            + [f"{one[name]:.0f}" for name in ("fixed_ms", "kernel_us", "transfer_us")]
            + [_percent(one["left"])]
            for one in fitted["paced"]
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
            f"* {untried} rows are not priced: those that are, are of a sample over sources, models"
            " and degrees (`benchmarks/published/sample.py`), drawn before any was priced, as far"
            " as the run came; peaks came first."
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


def _own(own: Mapping[str, Any]) -> Iterator[str]:
    yield "## An own measurement, held out"
    used = own["rows"]
    times = [row["predicted"] / row["measured"] - 1 for row in used]
    peaks = [row["predicted_gib"] / row["measured_gib"] - 1 for row in used]
    yield (
        "Steps of six models on one H100 of 700 W (`benchmarks/gpu/h100.json`), which no figure is"
        f" fitted to and no mean above has: {len(times)} times, MAPE"
        f" {_percent(fmean(map(abs, times)))}, bias {_signed(fmean(times))}; {len(peaks)} allocated"
        f" peaks, MAPE {_percent(fmean(map(abs, peaks)))}. Models are in bfloat16 under torch's"
        " default AdamW. Prices of compiled programs are those of layers that are compiled one by"
        " one; what a compiler saves over the whole program they do not have."
    )
    yield table(
        ["model and run", "measured", "predicted", "error", "peak, GiB", "predicted", "error"],
        [[f"{row['model']}: {row['run']}", *_errors(row)] for row in used],
    )
    yield from _own_kinds(own["kinds"])
    yield _origin(own, "own.json")


def _errors(row: Mapping[str, Any]) -> list[str]:
    time = row["measured"], row["predicted"]
    found = [*(f"{1e3 * one:.1f} ms" for one in time), _signed(time[1] / time[0] - 1)]
    peak = row["measured_gib"], row["predicted_gib"]
    return [*found, *(f"{one:.2f}" for one in peak), _signed(peak[1] / peak[0] - 1)]


def _own_kinds(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    yield (
        "Where the time of the modules is, in milliseconds of kernels, measured and as the preset"
        " prices them without launches and without the host. Products run faster here than the"
        " published rows of Hopper GPUs say, which are of many GPUs in long runs. Other kernels are"
        " slower. In the sum of a step the two errors partly cancel. The update is torch's default"
        " on one GPU, one operator after the other for all parameters; the last but one column has"
        " what it is as one kernel (`fused=True`). The host is what Python needs to issue one"
        " kernel, in microseconds, to be compared with `issue` of the second table of this page."
    )
    kinds = ("products", "attention", "others")
    rows = [
        [
            name,
            *(_measured_and_priced(one, kind) for kind in kinds),
            f"{1e3 * one['priced']['update']:.1f}",
            f"{1e3 * one['priced']['fused']:.1f}",
            f"{1e6 * one['measured']['host'] / one['measured']['kernels']:.1f}",
        ]
        for name, one in found.items()
    ]
    ends = ("of it update", "update if fused", "host of a kernel")
    yield table(["measured / priced", *kinds, *ends], rows)


def _measured_and_priced(one: Mapping[str, Mapping[str, float]], kind: str) -> str:
    return f"{1e3 * one['measured'][kind]:.1f} / {1e3 * one['priced'][kind]:.1f}"


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
        " nine of ten rows under the same conditions, widened by the factor with which nine of ten"
        " rows of each of those sources are in the interval of the rest. Conditions are the kind of"
        " GPU, mixtures or dense models, the bits of products, compiled or eager layers, pipelines"
        " or none, and the predicted time of a micro-batch, in classes: residuals of micro-batches"
        " of under 100 ms are above those of longer ones, as launches and the host decide there,"
        " and none of under 20 ms was measured. Users are told of a prediction under conditions of"
        " which there are too few rows that no measurement is comparable; a source is not compared"
        " where the others have too few."
    )
    found = coverage(held_out(fitted, read()))
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


def _origin(data: Mapping[str, Any], file: str) -> str:
    return (
        f"`{data['command']}`, {data['date']}, at commit {data['commit'][:7]}:"
        f" `benchmarks/published/{file}`. Predictions by the code with hash"
        f" `{data['code'][:16]}`."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
