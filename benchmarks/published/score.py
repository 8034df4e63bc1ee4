"""Compares predictions with what was published: errors, order, memory and verdicts.

Errors are relative to what was published. Figures over several sources are means of the sources'
figures, so that a source with many rows counts no more than another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from scipy.stats import spearmanr

from benchmarks.published.causes import cause_of
from benchmarks.published.comparisons import comparison
from benchmarks.published.fit import NOT_FITTED
from benchmarks.published.row import Row
from benchmarks.published.run import Prediction, code
from shardwright.report.accuracy import Fit, MeasuredRatios, fit_of

OUTCOMES = tuple(f"{happened}, {fit.value}" for happened in ("ran", "ran out") for fit in Fit)
_GROUP = 4  # rows that an order is judged by, at least
_ELEMENTS = ((1, "under 1 Mi"), (4, "1 Mi to 4 Mi"), (16, "4 Mi to 16 Mi"))
_SIZES = ((1e9, "under 1B"), (3e9, "1B to 3B"), (15e9, "3B to 15B"), (60e9, "15B to 60B"))


@dataclass(frozen=True, slots=True)
class Pair:
    """A row with its prediction, which has a time and a peak."""

    row: Row
    prediction: Prediction

    @property
    def error(self) -> float | None:
        """Of the time of a step; None where none is published."""
        return _error(self.prediction.seconds, self.row.step_seconds)

    @property
    def peak_gib(self) -> float | None:
        """The predicted figure that the published one is compared with: reserved or allocated."""
        kept, given = self.prediction.reserved_gib, self.prediction.gib
        return kept if self.row.memory_kind == "reserved" else given

    @property
    def memory_error(self) -> float | None:
        """Of the peak; None where none is published."""
        return _error(self.peak_gib, self.row.memory_gib)

    def fit(self, comparable: MeasuredRatios | None) -> Fit:
        """The verdict on the memory of a device, in view of `comparable` peaks."""
        gib, capacity = self.prediction.gib, self.prediction.capacity_gib
        assert gib is not None and capacity is not None
        return fit_of(gib, capacity, comparable)[0]


def _error(predicted: float | None, published: float | None) -> float | None:
    if predicted is None or not published:
        return None
    return predicted / published - 1


def size_of(row: Row) -> str:
    """The class of sizes of the row's model."""
    return next((name for limit, name in _SIZES if row.parameters < limit), "over 60B")


def elements_of(row: Row) -> str:
    """The class of elements that an activation of one micro-batch has on a device."""
    count = row.micro_batch * row.sequence * row.hidden / (row.tp * row.cp) / 2**20
    return next((name for limit, name in _ELEMENTS if count < limit), "over 16 Mi")


def result_of(rows: Sequence[Row], found: Mapping[str, Prediction]) -> dict[str, Any]:
    """The score and all that the page shows, as JSON has it."""
    used = [row for row in rows if not row.excluded]
    tried = [Pair(row, found[row.key]) for row in used if row.key in found]
    pairs = [pair for pair in tried if not pair.prediction.unpriced]
    refused = [pair for pair in tried if pair.prediction.unpriced]
    by: dict[str, Callable[[Row], str]] = {
        "source": lambda row: row.source,
        "gpu": lambda row: row.gpu,
        "size": size_of,
        "precision": lambda row: row.precision,
        "elements": elements_of,
    }
    return {
        "code": code(),
        "commits": _commits(rows, found),
        "counts": _counts(rows, found),
        "overall": _overall(pairs),
        "by": {name: _split(pairs, key) for name, key in by.items()},
        "causes": _split(pairs, cause_of),
        "memory": _memory(pairs),
        "verdicts": _verdicts(pairs),
        "excluded": _reasons((row.source, row.excluded) for row in rows if row.excluded),
        "unpriced": _reasons((pair.row.source, pair.prediction.unpriced) for pair in refused),
        "approximated": dict(
            Counter(word for pair in pairs for word in pair.prediction.approximated).most_common()
        ),
        "points": [_point(pair) for pair in pairs],
    }


def _commits(rows: Sequence[Row], found: Mapping[str, Prediction]) -> dict[str, dict[str, int]]:
    """Rows that were priced at each commit, by source."""
    counts = defaultdict[str, Counter[str]](Counter)
    for row in rows:
        if not row.excluded and row.key in found:
            counts[row.source][found[row.key].commit[:8]] += 1
    return {source: dict(count.most_common()) for source, count in counts.items()}


def _counts(rows: Sequence[Row], found: Mapping[str, Prediction]) -> dict[str, dict[str, int]]:
    """By source: rows read, excluded, refused, priced and not yet tried."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        names = ("read", "excluded", "unpriced", "priced", "untried")
        count = counts.setdefault(row.source, dict.fromkeys(names, 0))
        count["read"] += 1
        one = found.get(row.key)
        if row.excluded:
            count["excluded"] += 1
        elif one is None:
            count["untried"] += 1
        else:
            count["unpriced" if one.unpriced else "priced"] += 1
    return counts


def _overall(pairs: Sequence[Pair]) -> dict[str, float | int | None]:
    """Means over sources."""
    sources = _split(pairs, lambda row: row.source).values()
    return {
        "sources": len(sources),
        "rows": sum(one["rows"] for one in sources),
        "mape": _mean(one["mape"] for one in sources),
        "bias": _mean(one["bias"] for one in sources),
        "spearman": _mean(one["spearman"] for one in sources),
    }


def _split(pairs: Sequence[Pair], key: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.error is not None:
            groups[key(pair.row)].append(pair)
    return {name: _times(groups[name]) for name in sorted(groups)}


def _times(pairs: Sequence[Pair]) -> dict[str, Any]:
    errors = [pair.error for pair in pairs if pair.error is not None]
    size = sorted(abs(error) for error in errors)
    return {
        "rows": len(errors),
        "sources": len({pair.row.source for pair in pairs}),
        "mape": fmean(size),
        "median": size[len(size) // 2],
        "p90": size[min(len(size) - 1, int(0.9 * len(size)))],
        "bias": fmean(errors),
        "spearman": _order(pairs),
    }


def _order(pairs: Sequence[Pair]) -> float | None:
    """Spearman's correlation within groups of one model, GPU and global batch, on average."""
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        row = pair.row
        key = (row.source, row.model, row.gpu, row.gpus, row.sequence, row.global_batch)
        groups[key].append(pair)
    found = []
    for group in groups.values():
        published = [pair.row.step_seconds for pair in group]
        predicted = [pair.prediction.seconds for pair in group]
        if len(group) >= _GROUP and len(set(published)) > 1 and len(set(predicted)) > 1:
            found.append(float(spearmanr(published, predicted).statistic))
    return fmean(found) if found else None


def _memory(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """By source and kind of memory: rows, mean error and bias of peaks."""
    groups: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        if pair.memory_error is not None:
            groups[f"{pair.row.source}, {pair.row.memory_kind}"].append(pair.memory_error)
    return {
        name: {
            "rows": len(errors),
            "mape": fmean(abs(error) for error in errors),
            "bias": fmean(errors),
        }
        for name, errors in sorted(groups.items())
    }


def _verdicts(pairs: Sequence[Pair]) -> dict[str, dict[str, int]]:
    """By source: rows by what happened and what was predicted, in view of the other sources.

    Rows with memory that is not priced have no verdict.
    """
    counts: dict[str, dict[str, int]] = {}
    for source in sorted({pair.row.source for pair in pairs}):
        others = comparison(peak_ratios(pairs, without=source))
        count = counts.setdefault(source, dict.fromkeys(OUTCOMES, 0))
        for pair in pairs:
            if pair.row.source == source and pair.row.has_known_memory:
                happened = "ran" if pair.row.verdict == "ran" else "ran out"
                count[f"{happened}, {pair.fit(others).value}"] += 1
    return counts


def peak_ratios(pairs: Iterable[Pair], without: str) -> Iterator[tuple[str, float]]:
    """The source of each published peak, and the peak over what was predicted."""
    for pair in pairs:
        decides = pair.row.source not in (without, *NOT_FITTED)
        if decides and pair.memory_error is not None:
            yield pair.row.source, 1 / (1 + pair.memory_error)


def _reasons(found: Iterable[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """By source: reasons and how many rows have each, the most frequent first."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for source, reason in found:
        counts[source][reason] += 1
    return {source: dict(counts[source].most_common()) for source in sorted(counts)}


def _point(pair: Pair) -> dict[str, Any]:
    return {
        "key": pair.row.key,
        "source": pair.row.source,
        "parameters": round(pair.row.parameters),
        "published": pair.row.step_seconds,
        "predicted": _rounded(pair.prediction.seconds),
        "published_gib": pair.row.memory_gib,
        "predicted_gib": _rounded(pair.peak_gib),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def commits(data: Mapping[str, Any]) -> Iterator[str]:
    """A sentence with the commits at which rows were priced, where these are several."""
    by = data["commits"]
    if len({commit for counts in by.values() for commit in counts}) < 2:
        return
    each = "; ".join(
        f"{source} {', '.join(f'{count} at {commit}' for commit, count in counts.items())}"
        for source, counts in by.items()
    )
    yield f"Rows were priced at these commits: {each}."
