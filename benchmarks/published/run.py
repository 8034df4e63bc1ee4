"""Prices all rows and keeps a prediction, or the reason against one, for each.

A run that is stopped goes on where it was: finished rows are kept in `predictions.rows`, each
with hashes of itself and of the code that priced it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from benchmarks.published.graphs import Shape, UnpriceableError, code_digest, graph_of
from benchmarks.published.row import Row
from benchmarks.published.setups import (
    approximations,
    held_bytes,
    machine_of,
    optimizer_of,
    strategy_of,
)
from benchmarks.record import commit
from shardwright.ir.layout import Bytes
from shardwright.ir.options.fp8 import Fp8Recipe
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.form import recipe_for
from shardwright.planner.strategies.unpriced import require_recipe
from shardwright.rules.operators.fp8_layers import with_fp8
from shardwright.tracing.op_memory.footprints import Footprints

LOG = Path(__file__).with_name("predictions.rows")
_GIB = 2**30
_NEAR = 0.75  # of a device's memory, from where sums of the tables are not taken for the peak
_MANY_STAGES = 8
_TOGETHER = 4  # rows of a task of a worker, which often share a graph


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted step of a row, or why there is none.

    Attributes:
        key: of the row.
        seconds: of a step; None without a prediction.
        gib: allocated at the peak of the rank that needs most, without the context.
        reserved_gib: what torch's allocator has reserved there; None where it is not simulated.
        capacity_gib: memory of a device of the preset.
        unpriced: why there is no prediction; empty where there is one.
        approximated: differences between the priced step and the published one.
        commit: at which it was made; empty before it is kept.
    """

    key: str
    seconds: float | None = None
    gib: float | None = None
    reserved_gib: float | None = None
    capacity_gib: float | None = None
    unpriced: str = ""
    approximated: tuple[str, ...] = ()
    commit: str = ""


def predict(row: Row) -> Prediction:
    """The prediction of a row; a row that cannot be priced has the reason instead.

    The memory of `sw.price` is simulated for rows that have published some, and where the sum of
    the cost tables is near the memory of a device; elsewhere it is that sum. Times are the same.
    """
    try:
        machine, strategy, shape = machine_of(row), strategy_of(row), Shape.of(row)
        require_recipe(strategy, machine)
        expansion = _expansion(shape, machine, optimizer_of(row), recipe_for(strategy))
        with paused():
            plan = _plan(expansion, strategy, simulated=_has_memory(row))
    except (UnpriceableError, StrategyError) as error:
        return Prediction(row.key, unpriced=str(error))
    return Prediction(
        row.key,
        seconds=plan.step_seconds,
        gib=(plan.peak_bytes + machine.device.workspace_bytes + held_bytes(row)) / _GIB,
        reserved_gib=None
        if plan.memory is None
        else (plan.memory.reserved + held_bytes(row)) / _GIB,
        capacity_gib=(machine.device.memory_bytes - machine.device.context_bytes) / _GIB,
        approximated=approximations(row),
    )


def _has_memory(row: Row) -> bool:
    return row.memory_gib is not None or row.verdict != "ran"


def _plan(expansion: Expansion, strategy: Strategy, *, simulated: bool) -> Plan:
    machine, optimizer = expansion.machine, expansion.optimizer
    analysis = expansion.sources.analysis
    # Frameworks update all parameters at once.
    plan = replace(expansion.plan(strategy), update_group_bytes=Bytes(0))
    tracer = Footprints(on_cpu=False)
    refinement = Refinement(expansion.graph, machine, optimizer, tracer, analysis)
    near = plan.peak_bytes > _NEAR * machine.device.usable_bytes
    if plan.pipeline is not None and not simulated:  # without a timeline of all passes
        seconds = refinement.seconds(plan)
        return refinement.compared(plan) if near else replace(plan, step_seconds=seconds)
    priced = refinement.settled(plan) if simulated or near else refinement.timed(plan)
    deeper = refinement.deepened(priced, machine.device.usable_bytes)
    return deeper if priced.memory is None else refinement.settled(deeper)


@lru_cache(maxsize=2)  # rows of one graph and machine are priced after each other
def _expansion(
    shape: Shape, machine: Machine, optimizer: str, recipe: Fp8Recipe | None
) -> Expansion:
    graph = graph_of(shape)
    return Expansion(graph if recipe is None else with_fp8(graph, recipe), machine, optimizer)


def predictions(rows: Sequence[Row], workers: int, log: Path = LOG) -> Iterator[Prediction]:
    """A prediction for each row, kept ones first.

    Equal setups are priced once. Rows of one graph follow each other; graphs come in an order
    without meaning, so that a run that is stopped has priced a sample of them. Pipelines of many
    stages take longest and come last.
    """
    kept = _kept(log)
    by_setup: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_setup[_digest(row)].append(row)
    for name, equal in by_setup.items():
        if name in kept:
            yield from (replace(kept[name], key=row.key) for row in equal)
    missing = [equal[0] for name, equal in by_setup.items() if name not in kept]
    names = {row.key: _digest(row) for row in missing}
    here, by = commit(), code()
    with log.open("a") as out:
        for found in _priced(sorted(missing, key=_graph_order), workers):
            one, name = replace(found, commit=here), names[found.key]
            out.write(json.dumps({"digest": name, "code": by, **asdict(one)}) + "\n")
            out.flush()
            yield from (replace(one, key=row.key) for row in by_setup[name])


def _priced(rows: Sequence[Row], workers: int) -> Iterator[Prediction]:
    if workers == 1 or len(rows) < workers:
        yield from map(predict, rows)
        return
    # Not a `Pool`, whose workers may have no children: some rules are found in one.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _one_thread)
    try:
        tasks = [
            pool.submit(_all_of, rows[i : i + _TOGETHER]) for i in range(0, len(rows), _TOGETHER)
        ]
        for task in as_completed(tasks):  # some rows take many minutes
            yield from task.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _all_of(rows: Sequence[Row]) -> list[Prediction]:
    return [predict(row) for row in rows]


def kept_predictions(
    rows: Sequence[Row], log: Path = LOG, *, older: bool = False
) -> dict[str, Prediction]:
    """The predictions that are kept for these rows, by the rows' keys.

    With `older`, rows without one by this code have the last one by other code.
    """
    kept = _kept(log, older=older)
    found = {row.key: kept.get(_digest(row)) for row in rows}
    return {key: replace(one, key=key) for key, one in found.items() if one is not None}


def code() -> str:
    """A hash of everything that predictions depend on, but the rows."""
    here = Path(__file__).parent
    packages = ("ir", "machine", "planner", "program", "rules", "simulate", "solve", "tracing")
    patterns = tuple(f"{package}/**/*.py" for package in packages)
    files = ("graphs.py", "mixtures.py", "modules.py", "setups.py", "run.py")
    return code_digest(patterns, tuple(here / name for name in files))


def _digest(row: Row) -> str:
    """Names what a prediction depends on: rows that differ in what was measured alone share it."""
    setup = replace(
        row, path="", commit="", line=0, metric="", published=None, step_seconds=None,
        memory_gib=None, memory_kind="", verdict="", note="",
    )  # fmt: skip
    return hashlib.sha256(repr((setup, _has_memory(row))).encode()).hexdigest()[:24]


def _graph_order(row: Row) -> tuple[bool, str, str, int, str]:
    shape = repr((row.family, row.layers, row.hidden, row.sequence, row.global_batch))
    deep = row.pp * row.virtual_stages > _MANY_STAGES
    return deep, hashlib.sha256(shape.encode()).hexdigest(), row.gpu, row.gpus, row.key


def _kept(log: Path, *, older: bool = False) -> dict[str, Prediction]:
    lines = log.read_text().splitlines() if log.exists() else []
    records, here = [json.loads(line) for line in lines], code()
    now = [record for record in records if record.get("code") == here]
    found = {}
    for record in (*records, *now) if older else now:
        approximated = tuple(record["approximated"])
        fields = {k: v for k, v in record.items() if k not in ("digest", "code")}
        found[record["digest"]] = Prediction(**(fields | {"approximated": approximated}))
    return found


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def with_progress(found: Iterator[Prediction], total: int) -> Iterator[Prediction]:
    """The same predictions; prints a line every few seconds."""
    start = shown = time.monotonic()
    for count, one in enumerate(found, 1):
        yield one
        now = time.monotonic()
        if now - shown > 10 or count == total:
            shown = now
            print(f"{count} of {total} rows, {now - start:.0f} s", flush=True)
