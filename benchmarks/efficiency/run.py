"""Step time of our program against hand-written parallelism of the same strategy, on local ranks.

    python -m benchmarks.efficiency.run -o benchmarks/efficiency/result.json
    python -m benchmarks.efficiency.run --parts -o benchmarks/efficiency/parts.json

Baselines of ours (data parallel, fully sharded, tensor parallel) run beside DDP, FSDP2 and
`parallelize_module` on two gloo ranks, a step of each in turn, in pairs whose order changes.
With `--parts` steps are taken in four micro-batches instead, beside FSDP2 with accumulation and
beside 1F1B of `torch.distributed.pipelining` with the same stages (`parts.py`).
Both begin with the same weights and must end with the same losses. Reported are medians and
quartiles of the ratios of neighbouring steps, by the wall and by the CPU time of a rank, which
counts what is copied or dispatched in vain even on a busy machine. Then some of them again with
both sides through `torch.compile`, which needs a C++ compiler (`--no-compiled`: without).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import shardwright as sw
from benchmarks import record
from benchmarks.efficiency import parts
from benchmarks.efficiency.strategies import BY_HAND, MODELS, step_by_hand
from shardwright.plan_io.plan_text import plan_to_json

SEED, RANKS, TARGET = 0, 2, 1.02
_ALIKE = 1e-4  # how far losses may be apart, relatively
PAIRS = tuple(
    (model, strategy)
    for model in MODELS
    for strategy in BY_HAND
    if not model.startswith("vgg") or strategy != "tensor parallel"  # no styles split convolutions
)
PARTS = tuple((model, strategy) for model in parts.CUTS for strategy in parts.BY_HAND)
COMPILED = (
    ("mlp", "data parallel"),
    ("vgg", "data parallel"),
    ("vgg-128", "data parallel"),
    ("llama", "data parallel"),
    ("llama", "tensor parallel"),
    ("llama", "fully sharded"),
)


def plan_of(model: str, strategy: str) -> sw.Plan:
    """Our baseline, or our strategy in parts, of that name."""
    module, batch = _made(model)
    graph, machine = sw.capture(module, (), batch), sw.Machine.preset(f"{RANKS}xcpu")
    if strategy in parts.STRATEGIES:
        return sw.price(graph, machine, parts.text_of(strategy, model), optimizer="momentum")
    frontier = sw.search(graph, machine, optimizer="momentum")
    known = {plan.name: plan for plan in frontier.baselines}
    return known[strategy]


@dataclass(frozen=True, slots=True)
class Pair:
    """What is compared, with our plan as JSON."""

    model: str
    strategy: str
    compiled: bool
    rounds: int
    seconds: float
    plan: str


def compare(
    model: str, strategy: str, rounds: int, seconds: float = 0, *, compiled: bool = False
) -> dict[str, Any]:
    """Medians and quartiles of both and of their ratio: of so many rounds, or for so long."""
    pair = Pair(model, strategy, compiled, rounds, seconds, plan_to_json(plan_of(model, strategy)))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        spawn(_rank, (str(store), pair), nprocs=RANKS)
        found = torch.load(store.with_suffix(".measured"), weights_only=True)  # a moment old
    return {
        "model": model,
        "strategy": strategy,
        "compiled": compiled,
        "rounds": len(found["wall"][0]),
        **{clock: _summary(*found[clock]) for clock in ("wall", "cpu")},
    }


def _summary(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "ours_seconds": statistics.median(ours),
        "by_hand_seconds": statistics.median(theirs),
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def _made(model: str) -> Any:
    torch.manual_seed(SEED)
    return MODELS[model]()


def _rank(rank: int, store: str, pair: Pair) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        module, batch = _made(pair.model)
        parallel: Any = sw.parallelize(
            module, sw.Plan.from_json(pair.plan), tune_host=record.TUNE_HOST
        )
        if pair.compiled:
            parallel.compile_programs()
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, momentum=0.9, foreach=True)
        ours: Callable[[], Tensor] = lambda: parallel.train_step(optimizer, batch)  # noqa: E731
        by_hand = _by_hand(pair)
        for _ in range(3):
            _compare(ours(), by_hand())
        measured = _measured((ours, by_hand), _rounds((ours, by_hand), pair))
        if rank == 0:
            torch.save(measured, Path(store).with_suffix(".measured"))
        dist.barrier()  # none leaves while another still sends
    finally:
        dist.destroy_process_group()


def _by_hand(pair: Pair) -> Callable[[], Tensor]:
    if pair.strategy in parts.BY_HAND:
        return parts.BY_HAND[pair.strategy](*_made(pair.model))
    return step_by_hand(pair.strategy, *_made(pair.model), compiled=pair.compiled)


def _rounds(steps: Sequence[Callable[[], Tensor]], pair: Pair) -> int:
    """As many as are asked for, or as fit into the time where those are more."""
    once = torch.tensor(_measured(steps, 3)["wall"], dtype=torch.float64).sum(0).median()
    return max(pair.rounds, int(pair.seconds / once.item()))


def _measured(steps: Sequence[Callable[[], Tensor]], rounds: int) -> dict[str, list[list[float]]]:
    """Wall seconds of the slower rank and CPU seconds of the mean one: by clock, step and round."""
    found = torch.zeros(2, len(steps), rounds, dtype=torch.float64)
    for number in range(rounds):
        order = range(len(steps)) if number % 2 else reversed(range(len(steps)))
        for place in order:
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            steps[place]()
            found[0, place, number] = time.perf_counter() - start
            found[1, place, number] = time.process_time() - busy
    wall, cpu = found
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return {"wall": wall.tolist(), "cpu": (cpu / RANKS).tolist()}


def _compare(ours: Tensor, theirs: Tensor) -> None:
    """Raise unless the losses agree: ours is the global one, theirs the mean of the ranks'."""
    mean = theirs.clone()
    dist.all_reduce(mean)
    mean /= RANKS
    if abs(float(ours - mean)) > _ALIKE * abs(float(mean)):
        raise RuntimeError(f"losses differ: ours {float(ours)}, by hand {float(mean)}")


def _line(row: dict[str, Any]) -> str:
    wall, cpu = row["wall"], row["cpu"]
    low, high = wall["ratio_quartiles"]
    how = "compiled" if row["compiled"] else "eager"
    return (
        f"{row['model']:7} {row['strategy']:26} {how:8} ours {wall['ours_seconds'] * 1e3:7.1f} ms,"
        f" by hand {wall['by_hand_seconds'] * 1e3:7.1f}: {wall['ratio']:.3f} ({low:.3f} to"
        f" {high:.3f}); CPU {cpu['ratio']:.3f}"
    )


def main() -> None:
    """Measure all pairs, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=40, help="of both, at least")
    parser.add_argument("--seconds", type=float, default=25, help="for a row, if rounds are short")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    known = [*BY_HAND, *parts.BY_HAND]
    parser.add_argument("--strategies", nargs="+", choices=known, default=known)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--parts", action="store_true", help="steps in micro-batches instead")
    options = parser.parse_args()
    rows = []
    eager, with_compiler = (PARTS, ()) if options.parts else (PAIRS, COMPILED)
    for compiled, pairs in ((False, eager), (True, with_compiler if options.compiled else ())):
        for model, strategy in pairs:
            if model in options.models and strategy in options.strategies:
                rows.append(
                    compare(model, strategy, options.rounds, options.seconds, compiled=compiled)
                )
                print(_line(rows[-1]), flush=True)
    record.write({"target": TARGET, "rows": rows}, options.output, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()
