"""The text and the JSON of what a config costs, what changes of it buy, and what is best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.frameworks.writing import Written
from shardwright.ir.memory import PARTS
from shardwright.ir.memory import as_json as memory_content
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.audit.auditor import Priced, PricedChange
from shardwright.planner.audit.priced_as import Replaced
from shardwright.report.accuracy import time_interval
from shardwright.report.headline import headline
from shardwright.report.plan_json import figures
from shardwright.report.units import duration, size

_GAIN = 5e-3  # of a step's time: single changes that buy less are not shown at first
_LEAST = 1e-3  # of a step's time: a plan that is faster by less is not shown
_SHOWN = 4  # single changes that fit, and then those that do not fit
_UNFIT = 1
_CAUSES = 4  # parts of the peak
_LABEL = 14
_WORD = 24  # characters of a value in the table of changes


@dataclass(frozen=True, slots=True)
class Best:
    """The best uniform strategy.

    Attributes:
        strategy: in the words of the config, with what is not priced.
        plan: the plan that it is priced as.
        results: what it changes in the numbers that training gives, a sentence each.
    """

    strategy: Strategy
    plan: Plan
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Improved:
    """A config with the best strategy that its format can express, and the plan of that."""

    written: Written
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPrices:
    """The costs of a config on a machine, and of what is better.

    Attributes:
        machine: the machine.
        limit: bytes of a rank; None: no limit.
        tokens: of a step.
        replaced: fields of the strategy that are priced with another value.
        base: the config; None where it does not fit the model.
        misfit: why it does not.
        changes: single changes of it, the best first.
        uniform: the best uniform strategy; None: none fits.
        beyond: the best plan of a search; None: not searched.
        searched: what the search was to cover, "near", "all" or "none".
    """

    machine: Machine
    limit: int | None
    tokens: int
    replaced: tuple[Replaced, ...]
    base: Priced | None
    misfit: str
    changes: tuple[PricedChange, ...]
    uniform: Best | None
    beyond: Plan | None
    searched: str = "none"

    @property
    def fits(self) -> bool:
        """Whether the config is within the memory limit."""
        base = self.base
        return base is not None and (self.limit is None or base.plan.peak_bytes <= self.limit)


def prices_text(prices: ConfigPrices, *, whole: bool) -> list[str]:
    """Lines: time and memory, single changes, the best; all changes if `whole`."""
    lines = [f"{'priced as':<{_LABEL}}{_priced_as(prices.replaced)}"] if prices.replaced else []
    if prices.base is None:
        lines += [f"{'no price':<{_LABEL}}{prices.misfit}"]
    else:
        plan = prices.base.plan
        lines.append(f"{'step':<{_LABEL}}{_speed(prices, plan)} on {prices.machine}")
        if interval := time_interval(plan, duration):
            lines.append(f"{'':<{_LABEL}}{interval}")
        lines.append(f"{'memory':<{_LABEL}}{_memory(prices, plan)}")
        lines += _changes(prices, whole=whole)
    lines += ["", *_best(prices)]
    return lines


def improved_text(improved: Improved, file: str, prices: ConfigPrices) -> list[str]:
    """Lines on the file that was written."""
    plan, written = improved.plan, improved.written
    lines = [f"wrote {file}: {written.strategy}", f"  {_against(prices, plan)}"]
    best = prices.uniform
    if best is not None and best.strategy != written.strategy:
        more = plan.step_seconds / best.plan.step_seconds - 1
        same = "keeps the results and that " if best.results else ""
        side = "more" if more >= 0 else "less"
        than = f"it takes {abs(more):.1%} {side} than the best uniform"
        lines.append(f"  the best that {same}its format can say; {than}")
    return lines


def prices_json(prices: ConfigPrices) -> dict[str, Any]:
    """The prices of a config that `audit` found, as one JSON object."""
    return {
        "machine": prices.machine.name,
        "limit_bytes": prices.limit,
        "priced_as": [
            {"field": one.field, "given": _word(one.given), "priced": _word(one.priced)}
            for one in prices.replaced
        ],
        "misfit": prices.misfit or None,
        "config": _plan_json(prices, prices.base.plan) if prices.base is not None else None,
        "changes": [
            {
                "field": one.change.field,
                "before": _word(one.change.before),
                "after": _word(one.change.after),
                "strategy": str(one.change.strategy),
                "step_change": -one.gain,
                "peak_bytes_change": one.bytes,
                "fits": one.fits,
                "simulated": one.is_simulated,
            }
            for one in prices.changes
        ],
        "best_uniform": None
        if prices.uniform is None
        else {
            **_plan_json(prices, prices.uniform.plan),
            "strategy": str(prices.uniform.strategy),
            "results": list(prices.uniform.results),
        },
        "best_plan": _plan_json(prices, prices.beyond) if prices.beyond is not None else None,
    }


def improved_json(
    improved: Improved | None, file: str, prices: ConfigPrices
) -> dict[str, Any] | None:
    """The written file; None where nothing was written."""
    if improved is None:
        return None
    return {
        "file": file,
        "strategy": str(improved.written.strategy),
        "reasons": list(improved.written.reasons),
        "text": improved.written.text,
        "price": _plan_json(prices, improved.plan),
    }


def _plan_json(prices: ConfigPrices, plan: Plan) -> dict[str, Any]:
    return {
        "strategy": plan.name,
        **figures(plan),
        "tokens_per_second": prices.tokens / plan.step_seconds,
        "utilisation": plan.utilisation,
        "fits": prices.limit is None or plan.peak_bytes <= prices.limit,
        "interval": time_interval(plan, duration) or None,
        "memory": memory_content(plan.memory),
        "compiled": plan.compiled,
        "fp8": plan.numerics.fp8 or None,
    }


def _priced_as(replaced: Sequence[Replaced]) -> str:
    """Fields that have another value, which may compute the same, and those that are left out."""
    left_out = [one for one in replaced if one.priced in (None, "off", ())]
    others = [one for one in replaced if one not in left_out]
    same, words = list[str](), list[str]()
    for one in others:
        (same if one.same else words).append(
            f"{one.field}={_word(one.priced)} for {_word(one.given)}"
        )
    if left_out:
        words.append("without " + ", ".join(f"{one.field}={_word(one.given)}" for one in left_out))
    said = [f"{'; '.join(same)}, which computes the same"] if same else []
    return "; ".join([*said, f"{'; '.join(words)}: not yet priced"] if words else said)


def _word(value: object) -> Any:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, int | float | str) or value is None else str(value)


def _speed(prices: ConfigPrices, plan: Plan) -> str:
    rate = prices.tokens / plan.step_seconds
    known = "" if plan.utilisation is None else f", MFU {plan.utilisation:.1%}"
    each = f"{rate / plan.devices:,.0f} per device"
    return f"{duration(plan.step_seconds)}, {rate:,.0f} tokens/s ({each}){known}"


def _memory(prices: ConfigPrices, plan: Plan) -> str:
    """The peak, whether it fits, and its largest causes."""
    limit = "" if prices.limit is None else f" of {size(prices.limit)}"
    verdict = "fits" if prices.fits else "does NOT fit"
    text = f"{size(plan.peak_bytes)}{limit}, {verdict}"
    if plan.memory is None:
        return text
    parts = {name: count for name, count in plan.memory.parts().items() if count}
    largest = sorted(parts, key=lambda name: -parts[name])[:_CAUSES]
    named = [
        f"{PARTS[name]} {size(parts[name])}"
        for name in largest
        if parts[name] > plan.peak_bytes / 100
    ]
    return f"{text}: {', '.join(named)}"


def _changes(prices: ConfigPrices, *, whole: bool) -> Iterator[str]:
    """A table of single changes."""
    every = prices.changes
    shown = every
    if not whole:
        helping = [one for one in every if one.gain > _GAIN or (not prices.fits and one.bytes < 0)]
        fitting = [one for one in helping if one.fits][:_SHOWN]
        shown = (*fitting, *[one for one in helping if not one.fits][:_UNFIT])
    yield ""
    if not shown:
        yield f"No single change of {len(every)} saves time within the memory."
        return
    names = [_change(one) for one in shown]
    width = max(len("single change"), *(len(name) for name in names))
    left = len(every) - len(shown)
    more = f"  ({left} more that cost time or do not fit: --all)" if left else ""
    yield f"{'single change':<{width}}     step        memory{more}"
    for name, one in zip(names, shown, strict=True):
        memory = f"{'-' if one.bytes < 0 else '+'}{size(abs(one.bytes))}" if one.bytes else "same"
        unfit = "  does not fit" * (not one.fits)
        yield f"{name:<{width}}  {-one.gain:>+7.1%}  {memory:>12}{unfit}"


def _change(priced: PricedChange) -> str:
    """The change in words, as "tp 8 -> 4, micro_batches 4"."""
    change = priced.change
    return f"{change.field} {_shown(change.before)} -> {_shown(change.after)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "default"
    text = str(_word(value)) if value != () else "none"
    head = text.partition(",")[0]
    return text if len(text) <= _WORD else f"{head},...{')' * ('(' in head)}"


def _best(prices: ConfigPrices) -> Iterator[str]:
    best = prices.uniform
    if best is None:
        yield "No uniform strategy fits these devices."
    elif prices.base is not None and best.plan is prices.base.plan:
        yield "best uniform  the config's own strategy"
    else:
        yield f"{'best uniform':<{_LABEL}}{best.strategy}"
        yield f"{'':<{_LABEL}}{_against(prices, best.plan)}"
        for sentence in best.results:
            yield f"{'':<{_LABEL}}changes results: {sentence}"
    yield from _beyond(prices)


def _beyond(prices: ConfigPrices) -> Iterator[str]:
    """Lines on the best plan of the search."""
    found, best = prices.beyond, prices.uniform
    if prices.searched == "none" or (found is None and best is None):
        return
    if found is None:
        yield f"{'best plan':<{_LABEL}}not searched beside a pipeline; --search all tries all plans"
        return
    if best is not None and found.step_seconds > (1 - _LEAST) * best.plan.step_seconds:
        also = "; --search all tries other axes" * (prices.searched == "near")
        yield f"{'best plan':<{_LABEL}}none found that is faster{also}"
        return
    yield f"{'best plan':<{_LABEL}}{headline(found)}"
    yield f"{'':<{_LABEL}}{_against(prices, found)}"
    if prices.base is not None and prices.base.plan.compiled and not found.compiled:
        yield f"{'':<{_LABEL}}of eager steps: pipelines were searched without compiled layers"


def _against(prices: ConfigPrices, plan: Plan) -> str:
    """Time and memory of a plan, and its time beside that of the config."""
    text = f"{duration(plan.step_seconds)}, {size(plan.peak_bytes)}"
    if prices.base is None:
        return text
    change = plan.step_seconds / prices.base.plan.step_seconds - 1
    return f"{text}: {change:+.1%}"
