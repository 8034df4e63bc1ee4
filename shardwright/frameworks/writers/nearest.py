"""`Nearest`: a strategy as near to a wanted one as a framework can express, with the reasons."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Batch
from shardwright.frameworks.errors import FrameworkError
from shardwright.ir.strategy.fields import AXES, DTYPE_FIELDS, MLPS
from shardwright.ir.strategy.recompute import Recompute, StrategyError
from shardwright.ir.strategy.strategy import Strategy

Dtypes = tuple[str, str, str, str]  # of parameters, reductions, gradients and state
WHOLE: Dtypes = ("float32", "float32", "float32", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """Facts that a written config states beside the strategy.

    Attributes:
        batch: sequences of a step, and tokens of a sequence.
        model: the model's name, as the framework calls it; None: left to the user.
        layers: its layers; None: unknown.
        clip: the norm to which gradients are clipped; None: the framework's default is left.
    """

    batch: Batch
    model: str | None = None
    layers: int | None = None
    clip: float | None = None


class Nearest:
    """A strategy under change: each change has the reason why the framework needs it."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = canonical(strategy)
        self.reasons: list[str] = []
        self.change("MLPs are computed whole", mlp=MLPS[0])

    def change(self, reason: str, **changes: Any) -> None:
        """Change fields, and record why; nothing where they have these values."""
        changed = canonical(self.strategy.but(**changes))
        if changed != self.strategy:
            self.strategy = changed
            self.reasons.append(reason)

    def one_of(self, field: str, values: Container[Any], instead: Any, reason: str) -> None:
        """Change a field that has none of the values to one that it can have."""
        if getattr(self.strategy, field) not in values:
            self.change(reason, **{field: instead})

    def fold(self, axis: str, reason: str) -> None:
        """Give the devices of an axis to `dp_shard`."""
        now = self.strategy
        degree = getattr(now, axis)
        if degree == 1:
            return
        changes: dict[str, Any] = {axis: 1, "dp_shard": now.dp_shard * degree}
        if axis == "pp":
            changes |= {"schedule": "1F1B", "virtual_stages": 1, "stage_cut": None}
        self.change(reason, **changes)

    def plain_order(self) -> None:
        """Order the axes as most frameworks do."""
        self.change(f"the order of axes is {', '.join(AXES)}", order=AXES)

    def fsdp2(self) -> None:
        """Shard as FSDP2 does, which has no ZeRO stage below 3."""
        now = self.strategy
        if now.dp_shard * now.cp > 1 and now.zero < 3:
            self.change(
                f"FSDP2 shards parameters, gradients and state; zero={now.zero} is nearest to FSDP2"
                " that keeps gathered parameters",
                zero=3,
                reshard_after_forward=False,
            )

    def schedule(self, known: Container[str], why: str) -> None:
        """Change a pipeline's schedule to a known one of as many stages, or else to 1F1B."""
        now = self.strategy
        if now.pp == 1 or now.schedule in known:
            return
        single: dict[str, Any] = {"schedule": "1F1B", "virtual_stages": 1, "stage_cut": None}
        looped = {"schedule": "Interleaved1F1B"}
        for changes in (looped, single) if now.virtual_stages > 1 else (single,):
            if changes["schedule"] in known and _possible(now, changes):
                self.change(why, **changes)
                return
        raise FrameworkError(
            f"{why}, and {now.micro_batches} micro-batches fit no schedule that it has"
        )

    def dtypes(self, known: Mapping[Dtypes, str], default: Dtypes) -> None:
        """Change dtypes to known ones, those that share most and the first above all."""
        now = tuple(getattr(self.strategy, field) for field in DTYPE_FIELDS)
        if any(now == one for one in known):
            return

        def shared(one: Dtypes) -> tuple[bool, int]:
            same = [a == b for a, b in zip(one, now, strict=True)]
            return same[0], sum(same)

        captured = now == (None,) * len(now)
        best = default if captured else max(known, key=shared)
        why = (
            f"dtypes are not given; {known[best]} is written"
            if captured
            else f"the nearest dtypes that it has are {known[best]}"
        )
        self.change(why, **dict(zip(DTYPE_FIELDS, best, strict=True)))

    def recompute(self, holds: bool, instead: Recompute, reason: str) -> None:
        """Change what is recomputed unless something holds."""
        if not holds:
            self.change(reason, recompute=instead)

    def fit_batch(self, batch: Batch) -> int:
        """Samples of a micro-batch on one rank; takes fewer micro-batches where they do not fit.

        Raises `FrameworkError` where the batch does not divide at all.
        """
        now = self.strategy
        ranks = now.dp_replicate * now.dp_shard
        samples = batch.samples
        if samples is None:
            raise FrameworkError("the samples of a step are needed; give the global batch")
        if samples % ranks:
            raise FrameworkError(
                f"{samples} samples of a step are not divided by {ranks} data-parallel ranks, which"
                " is what it could express"
            )
        each = samples // ranks
        if each % now.micro_batches:
            fitting = (n for n in range(now.micro_batches, 0, -1) if each % n == 0)
            count = next(n for n in fitting if _possible(now, {"micro_batches": n}))
            self.change(
                f"{samples} samples over {ranks} ranks are divided in {count} micro-batches,"
                f" not in {now.micro_batches}",
                micro_batches=count,
            )
        return each // self.strategy.micro_batches


def _possible(strategy: Strategy, changes: dict[str, Any]) -> bool:
    try:
        strategy.but(**changes)
    except StrategyError:
        return False
    return True
