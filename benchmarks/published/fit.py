"""Fit the figures of presets to published rows, and score them on sources that are left out.

    python -m benchmarks.published.fit --rows 300

Rows are sampled from all sources with times, of which those in `NOT_FITTED` are scored alone; each
source counts as much as any other. A figure stays near the guess that documents give,
unless rows of several sources say otherwise. Features of rows are kept in `features.rows`, so a
second fit takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from benchmarks.published.evaluate import Figures, Steps
from benchmarks.published.features import Features, features_of
from benchmarks.published.graphs import Shape, UnpriceableError, graph_of
from benchmarks.published.own_host import own_host
from benchmarks.published.row import Row, read
from benchmarks.published.sample import SEED, sample
from benchmarks.published.setups import machine_of, optimizer_of, strategy_of
from benchmarks.record import write
from shardwright.ir.strategy.recompute import Recompute, StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.fitted import OVERLAP
from shardwright.planner.strategies.expansion import Expansion

FOLDER = Path(__file__).with_name("features.rows")  # git ignores it
RESULT = Path(__file__).with_name("fit.json")
NOT_FITTED = ("megatron-lm",)
NOT_FITTED_BECAUSE = (
    "tiny models of continuous integration with deterministic kernels, whose hosts set the pace"
)
# Name: guess, how far from it a figure is as a factor, least and greatest value.
GUESSES: Mapping[str, tuple[float, float, float, float]] = {
    "efficiency.matmul/ampere": (0.80, 1.15, 0.4, 0.95),
    "efficiency.matmul/hopper": (0.70, 1.15, 0.4, 0.95),
    "efficiency.attention/ampere": (0.50, 1.15, 0.05, 0.8),
    "efficiency.attention/hopper": (0.38, 1.15, 0.05, 0.8),
    "efficiency.memory": (0.80, 1.1, 0.5, 0.92),
    "launch": (2.0, 1.5, 0.5, 10.0),
    "issue": (30.0, 1.5, 5.0, 400.0),
    "product_depth": (64.0, 1.5, 8.0, 512.0),
    "link bandwidth": (0.80, 1.1, 0.4, 0.95),
    "collective_launch": (20.0, 1.5, 2.0, 200.0),
}
_PRIOR = 0.02  # weight of the guesses
_HOST_BOUND = 0.2  # part of a source's steps that its hosts decide, from which they are a sample
_OUTLIER = 0.15  # relative error from which a row counts less


def main() -> None:
    """Extract, fit, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.fit", description=__doc__)
    parser.add_argument("--rows", type=int, default=300, help="rows of the sample")
    parser.add_argument("--kept", action="store_true", help="fit to all rows with kept features")
    asked = parser.parse_args()
    usable = usable_rows()
    chosen = [row for row in usable if _file(row).exists()] if asked.kept else None
    kept = dict(kept_features(sample(usable, asked.rows) if chosen is None else chosen))
    rows = [row for row, _ in kept.values()]
    steps = Steps.of(rows, [one for _, one in kept.values()])
    sources = np.array([row.source for row in rows])
    figures = fit(steps, np.ones(len(rows), bool))
    for name, value in figures.items():
        print(f"{name:<30} {value:.4g}")
    print("fitted to these rows:")
    here = steps.seconds(figures) / steps.published
    within = _show(sources, here)
    print("left out of the fit, source by source:")
    held, without = here.copy(), {}
    for source in sorted(set(sources)):
        mine = sources == source
        without[source] = fit(steps, ~mine)
        held[mine] = (steps.seconds(without[source]) / steps.published)[mine]
    result = {
        "figures": _rounded(figures),
        "without": {source: _rounded(one) for source, one in without.items()},
        "fitted": within,
        "held_out": _show(sources, held),
        "rows": [
            {
                "key": row.key,
                "source": row.source,
                "gpu": row.gpu,
                "host": round(float(host), 3),
                "fitted": round(float(one), 4),
                "held_out": round(float(other), 4),
            }
            for row, one, other, host in zip(
                rows, here, held, _host_shares(steps, figures), strict=True
            )
        ],
        "paced": list(_paced(steps, held)),
    }
    write(result, RESULT, seed=SEED)


def _paced(steps: Steps, held: np.ndarray) -> Iterator[dict[str, Any]]:
    """The parts of steps of sources in `NOT_FITTED`, by GPU: a diagnosis that no figure rests on.

    Least squares over the group's own rows, of a fixed part, one for each kernel and one for each
    transfer of activations.
    """
    ours = [i for i, row in enumerate(steps.rows) if row.source in NOT_FITTED]
    launched, exchanged = steps.launched, steps.exchanged
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i in ours:
        groups[steps.rows[i].gpu, steps.rows[i].gpus].append(i)
    for (gpu, gpus), group in sorted(groups.items()):
        published = steps.published[group]
        counts = np.array([[1, launched[i], exchanged[i]] for i in group], float)
        parts, _ = nnls(counts / published[:, None], np.ones(len(group)))
        yield {
            "gpus": f"{gpus} x {gpu}",
            "rows": len(group),
            "predicted": round(float(np.median(held[group])), 3),
            "kernels": round(float(np.median(1e6 * published / counts[:, 1])), 1),
            "fixed_ms": round(1e3 * float(parts[0]), 1),
            "kernel_us": round(1e6 * float(parts[1]), 1),
            "transfer_us": round(1e6 * float(parts[2]), 1),
            "left": round(float(np.abs(counts @ parts / published - 1).mean()), 4),
        }


def usable_rows() -> list[Row]:
    """Rows with times of models and precisions that features describe."""
    return [row for row in read() if not row.excluded and row.step_seconds and _is_plain(row)]


def _is_plain(row: Row) -> bool:
    if row.compiled or row.precision.startswith(("fp8", "nvfp4")) or row.zero == 1:
        return False
    return row.recompute != "attention"


def fit(steps: Steps, used: np.ndarray) -> dict[str, float]:
    """The figures that suit the rows that are `used`, (rows,).

    Hosts differ by several times, between frameworks and machines. So a source whose steps depend
    on `issue` is one sample of hosts, and the figure is the geometric mean of these samples, the
    guess and the host of our own program (`own_host`).
    """
    sources = np.array([row.source for row in steps.rows])
    fitted = used & ~np.isin(sources, NOT_FITTED)
    free = fitted_figures(steps, fitted, {})
    samples = [GUESSES["issue"][0], own_issue()]
    for source in sorted(set(sources[fitted])):
        mine = fitted & (sources == source)
        if _host_share(steps, mine, free) > _HOST_BOUND:
            alone = {name: value for name, value in free.items() if name != "issue"}
            samples.append(fitted_figures(steps, mine, alone)["issue"])
    return fitted_figures(steps, fitted, {"issue": float(np.exp(np.mean(np.log(samples))))})


@cache
def own_issue() -> float:
    """Microseconds to issue a kernel of our own program."""
    return own_host() * 1e6


def _host_share(steps: Steps, used: np.ndarray, figures: Figures) -> float:
    """The mean of `_host_shares` of the rows that are `used`."""
    return float(_host_shares(steps, figures)[used].mean())


def _host_shares(steps: Steps, figures: Figures) -> np.ndarray:
    """By what part of one per cent each step gets slower if hosts do by one per cent: (rows,)."""
    slower = {**figures, "issue": 1.01 * figures["issue"]}
    found: np.ndarray = np.log(steps.seconds(slower) / steps.seconds(figures)) / np.log(1.01)
    return found


def fitted_figures(
    steps: Steps, used: np.ndarray, known: Figures, overlap: float = OVERLAP
) -> dict[str, float]:
    """The figures that are not `known`, and those that are."""
    names = [name for name in GUESSES if name not in known]
    guess, factor, least, most = np.log(np.array([GUESSES[name] for name in names]).T)
    sources = np.array([row.source for row in steps.rows])
    counts = {source: (sources[used] == source).sum() for source in set(sources[used])}
    weights = np.array([counts.get(source, 1) ** -0.5 for source in sources])[used]
    published = steps.published

    def figures(logs: np.ndarray) -> dict[str, float]:
        return {**known, **dict(zip(names, np.exp(logs).tolist(), strict=True))}

    def residuals(logs: np.ndarray) -> np.ndarray:
        errors = np.log(steps.seconds(figures(logs), overlap) / published)[used]
        robust = _OUTLIER * np.sqrt(2 * (np.sqrt(1 + (errors / _OUTLIER) ** 2) - 1))
        return np.concatenate([robust * weights, _PRIOR * (logs - guess) / factor])

    found = least_squares(residuals, guess, bounds=(least, most), diff_step=1e-3, max_nfev=40)
    return figures(found.x)


def kept_features(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[Row, Features]]]:
    """The features of rows that can be priced, those of former runs first read."""
    FOLDER.mkdir(exist_ok=True)
    start = time.monotonic()
    for number, row in enumerate(sorted(rows, key=lambda one: (one.source, one.model, one.key)), 1):
        file = _file(row)
        if not file.exists():
            file.write_bytes(pickle.dumps(_features(row)))
        if (found := pickle.loads(file.read_bytes())) is not None:
            yield row.key, (row, found)
        if number % 20 == 0:
            print(f"{number} of {len(rows)} rows, {time.monotonic() - start:.0f} s", flush=True)


def _file(row: Row) -> Path:
    return FOLDER / f"{hashlib.sha256(repr(row).encode()).hexdigest()[:24]}.pickle"


def _features(row: Row) -> Features | None:
    try:
        strategy, machine, shape = _priceable(strategy_of(row)), machine_of(row), Shape.of(row)
        expansion = Expansion(graph_of(shape), machine, optimizer_of(row))
        candidate = expansion.expanded(strategy)
    except (UnpriceableError, StrategyError):
        return None
    return features_of(row, candidate, candidate.plan(0.0, ()))


def _priceable(strategy: Strategy) -> Strategy:
    """Without recomputation by operators, which `Steps` adds."""
    if strategy.recompute.kind == "ops":
        return strategy.but(recompute=Recompute("none"))
    return strategy


def _show(sources: np.ndarray, ratios: np.ndarray) -> dict[str, dict[str, float]]:
    """Print errors by source, and return them."""
    found = {}
    for source in sorted(set(sources)):
        errors = ratios[sources == source] - 1
        one = {
            "rows": len(errors),
            "mape": round(float(np.abs(errors).mean()), 4),
            "bias": round(float(errors.mean()), 4),
        }
        found[str(source)] = one
        print(f"  {source:<16} {one['rows']:>4} rows, MAPE {one['mape']:.1%}, {one['bias']:+.1%}")
    print(f"  mean of sources: {np.mean([one['mape'] for one in found.values()]):.1%}")
    return found


def _rounded(figures: Figures) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


if __name__ == "__main__":
    main()
