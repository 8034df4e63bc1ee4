"""One training run in a simulated pipeline, and the errors of its predicted weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.spectrain_accuracy.subjects import SUBJECTS, DigitsCNN
from shardwright.runtime.async_pipeline.prediction import decayed, linear, predict
from shardwright.runtime.async_pipeline.simulation import AsyncSimulation
from shardwright.runtime.pipeline.stage import cut_stages
from shardwright.tracing.discovery.discover import capture_with_rules
from shardwright.tracing.graph_builder import Captured

WARM_UP = 20  # updates over which the learning rate rises


@dataclass(frozen=True)
class Run:
    """One training run; `weights` is "synchronous" or how the pipeline chooses them.

    With `discount` late stages begin with smaller learning rates (`runtime.discount`), for so many
    updates.
    """

    subject: str
    optimizer: str
    stages: int
    weights: str
    seed: int
    steps: int
    rate: float = 0.0  # the subject's own if 0
    discount: int = 0

    @property
    def contestant(self) -> str:
        """What is compared."""
        return f"{self.weights}, discounted" if self.discount else self.weights


def train(run: Run) -> dict[str, Any]:
    """Loss of every step, and loss (accuracy too, for digits) on what was held out."""
    torch.set_num_threads(1)
    subject = SUBJECTS[run.subject]
    model, simulation = simulate(run)
    losses = [
        float(simulation.train_step(subject.batch(run.seed, step))) for step in range(run.steps)
    ]
    simulation.drain()
    tests = subject.held_out()
    found: dict[str, Any] = {
        **asdict(run),
        "losses": losses,
        "held_out": sum(float(simulation.evaluate(batch)) for batch in tests) / len(tests),
    }
    if isinstance(model, DigitsCNN):
        model.load_state_dict(simulation.state_dict())
        with torch.no_grad():
            right = sum(int((model.scores(x).argmax(1) == y).sum()) for x, y in tests)
        found["accuracy"] = right / sum(len(y) for _, y in tests)
    return found


def simulate(run: Run) -> tuple[nn.Module, AsyncSimulation]:
    """The model of a run and its pipeline before the first step."""
    subject = SUBJECTS[run.subject]
    torch.manual_seed(run.seed)
    model = subject.model()
    rate = run.rate or subject.rates[run.optimizer]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if run.optimizer == "momentum":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=rate)

    def warm_up(steps: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(steps, lambda n: min(1.0, (n + 1) / WARM_UP))

    alone = run.weights == "synchronous"
    stages = cut_stages(_captured(run.subject), 1 if alone else run.stages)
    weights = "stale" if alone else run.weights
    simulation = AsyncSimulation(
        stages, model, weights, optimizer, scheduler=warm_up, discount_steps=run.discount
    )
    return model, simulation


@cache
def _captured(subject: str) -> Captured:
    found = SUBJECTS[subject]
    return capture_with_rules(found.model(), found.batch(0, 0), {})


def prediction_errors(run: Run, furthest: int) -> dict[str, list[float]]:
    """Mean of ‖Ŵ − W‖ over a run, s = 1 … `furthest` updates ahead: stale, linear, decayed."""
    torch.set_num_threads(1)
    batch = SUBJECTS[run.subject].batch
    _, simulation = simulate(run)
    waiting: list[dict[tuple[str, int], list[torch.Tensor]]] = []
    sums: dict[tuple[str, int], float] = {}
    counted: dict[tuple[str, int], int] = {}
    for step in range(run.steps):
        simulation.train_step(batch(run.seed, step))
        if step < simulation.stages[0].stages + WARM_UP:
            continue  # from here on each call is one update of every stage
        now = [p.detach() for stage in simulation.stages for p in stage.module.trained()]
        for ahead, made in enumerate(reversed(waiting[-furthest:]), start=1):
            for how in ("stale", "linear", "decayed"):
                error = sum(
                    float((a - b).square().sum())
                    for a, b in zip(made[how, ahead], now, strict=True)
                )
                sums[how, ahead] = sums.get((how, ahead), 0.0) + error**0.5
                counted[how, ahead] = counted.get((how, ahead), 0) + 1
        waiting = [*waiting[-furthest:], _predictions(simulation, now, furthest)]
    return {
        how: [sums[how, s] / counted[how, s] for s in range(1, furthest + 1)]
        for how in ("stale", "linear", "decayed")
    }


def _predictions(
    simulation: AsyncSimulation, now: list[torch.Tensor], furthest: int
) -> dict[tuple[str, int], list[torch.Tensor]]:
    here = [p.clone() for p in now]
    found = {}
    for s in range(1, furthest + 1):
        found["stale", s] = here
        for how, predictor in (("linear", linear), ("decayed", decayed)):
            found[how, s] = [
                w
                for stage, update in zip(simulation.stages, simulation.updates, strict=True)
                for w in predict(update.optimizer, stage.module.trained(), s, predictor)
            ]
    return found
