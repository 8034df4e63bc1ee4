"""`plan --for`: the config of another framework that trains as a plan does, or nearly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.cli.console import working
from shardwright.cli.errors import UsageError
from shardwright.cli.planning import capturing
from shardwright.cli.writing import write_text
from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Batch
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.semantics import changed_numbers
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import WRITERS, Written, write_config
from shardwright.ir.gradient_sync import LAST
from shardwright.ir.options.mixed_precision import dtypes_of
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.fields import COMPILES, DTYPE_FIELDS
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.audit.auditor import Allowed, Auditor, Priced
from shardwright.planner.audit.priced_as import Replaced, priced_as
from shardwright.planner.strategies.recognition import same_decisions, strategy_of
from shardwright.report.export import FORMS
from shardwright.report.styles import NotExpressibleError

FRAMEWORKS = (*WRITERS, *(form for form in FORMS if form not in WRITERS))


@dataclass(frozen=True, slots=True)
class OfferedConfig:
    """A config for a plan.

    Attributes:
        text: of the file.
        strategy: what it says; None for a format of modules, which says the plan itself.
        seconds: of a step as it says.
        more: the part by which that is longer than a step of the plan; 0 if it says the plan.
        is_plan: whether it says the plan itself.
        changes: sentences on what it changes in the numbers that training gives.
        replaced: fields that `seconds` are of another value of, since that is what has a price.
    """

    text: str
    strategy: Strategy | None
    seconds: float
    more: float
    is_plan: bool
    changes: tuple[str, ...] = ()
    replaced: tuple[Replaced, ...] = ()


def config_for(
    plan: Plan,
    captured: capturing.CapturedTarget,
    machine: Machine,
    framework: str,
    limit: int | None,
) -> OfferedConfig:
    """The config that says the plan, or else the fastest strategy near it that one can say.

    Raises `UsageError` where the framework's configs can say nothing that fits.
    """
    tracer = captured.tracer(machine)
    auditor = Auditor(captured.graph, machine, captured.optimizer, tracer, limit)
    if framework not in WRITERS:
        try:
            return OfferedConfig(FORMS[framework](plan), None, plan.step_seconds, 0.0, True)
        except NotExpressibleError as e:
            return _nearest_of_modules(plan, auditor, framework, str(e))
    facts = ConfigFacts(batch=_batch(plan))
    dtypes = {n: d for n, d in zip(DTYPE_FIELDS, dtypes_of(captured.graph), strict=True) if d}
    files: dict[Strategy, Written] = {}

    def allowed(strategy: Strategy) -> Strategy | None:
        try:
            written = write_config(framework, canonical(strategy.but(**dtypes)), facts)
            priced, _ = priced_as(written.strategy, captured.graph, machine)
        except (FrameworkError, StrategyError):
            return None
        files.setdefault(priced, written)
        return priced

    with working(f"writing a config for {framework}"):
        itself = _itself(plan, auditor, allowed)
        best = itself or auditor.best_among(_starts(plan, auditor), allowed)
    if best is None:
        raise UsageError(
            f"--for {framework}: its configs can say no strategy that fits; use another"
        )
    written, seconds = files[best.strategy], best.plan.step_seconds
    more = seconds / plan.step_seconds - 1
    wanted = (strategy_of(plan) or written.strategy).but(**dtypes)
    changes = tuple(changed_numbers(wanted, written.strategy))
    return OfferedConfig(
        text=written.text,
        strategy=written.strategy,
        seconds=seconds,
        more=more,
        is_plan=itself is not None,
        changes=changes,
        replaced=tuple(
            Replaced(field, getattr(written.strategy, field), dtype)
            for field, dtype in dtypes.items()
            if getattr(written.strategy, field) != dtype
        ),
    )


def _nearest_of_modules(plan: Plan, auditor: Auditor, framework: str, reason: str) -> OfferedConfig:
    """The fastest strategy near a plan that a format of modules can say.

    Raises `UsageError` with the `reason` why it cannot say the plan where it can say none.
    """
    files: dict[Strategy, str] = {}

    def allowed(strategy: Strategy) -> Strategy | None:
        for one in _cut_at_layers(strategy, auditor.limits.layers or 0):
            try:
                files[one] = FORMS[framework](auditor.unsettled(one))
            except (NotExpressibleError, StrategyError):
                continue
            return one
        return None

    with working(f"looking for a plan that {framework} can say"):
        best = auditor.best_among(_starts(plan, auditor), allowed)
    if best is None:
        raise UsageError(f"--for {framework}: {reason}")
    seconds = best.plan.step_seconds
    more = seconds / plan.step_seconds - 1
    return OfferedConfig(files[best.strategy], best.strategy, seconds, more, False)


def _cut_at_layers(strategy: Strategy, layers: int) -> Iterator[Strategy]:
    """A strategy, and, of a pipeline that is cut evenly in time, the one of equal layers."""
    yield strategy
    if strategy.pp > 1 and strategy.stage_cut is None and layers >= strategy.stages:
        least, more = divmod(layers, strategy.stages)
        yield strategy.but(stage_cut=tuple(least + (n < more) for n in range(strategy.stages)))


def _itself(plan: Plan, auditor: Auditor, allowed: Allowed) -> Priced | None:
    """The strategy that the plan is, if the framework can say it."""
    strategy = strategy_of(plan)
    near = allowed(strategy) if strategy is not None else None
    if near is None:
        return None
    try:
        priced = auditor.price(near)
    except StrategyError:
        return None
    if near.dp_shard * near.cp == 1 and {plan.gradient_sync, priced.plan.gradient_sync} <= {
        None,
        LAST,
    }:
        # Gradients of parameters that are stored whole are reduced once by default.
        plan = replace(plan, gradient_sync=priced.plan.gradient_sync)
    return priced if same_decisions(priced.plan, plan) else None


def _starts(plan: Plan, auditor: Auditor) -> list[Strategy]:
    """The strategies nearest to the plan, and the best of all uniform ones."""
    near = strategy_of(plan)
    like = Strategy(compile=COMPILES[plan.compiled]).in_form(plan.numerics)
    best = auditor.uniform(like)
    return [*([near] if near is not None else []), *([best.strategy] if best is not None else [])]


def _batch(plan: Plan) -> Batch:
    """Sequences and tokens of the plan's input of tokens; raises `UsageError` without one."""
    for one in plan.inputs:
        if "int" in one.dtype and len(one.shape) == 2:
            return Batch(samples=one.shape[0], sequence=one.shape[1])
    raise UsageError("--for writes configs that train on tokens, and no input of this model is any")


def write_offer(offered: OfferedConfig, framework: str, file: str | None) -> list[str]:
    """Write the file; lines on it, and its text where there is no file."""
    lines = []
    if offered.is_plan:
        lines.append(f"config for {framework}: says this plan")
    else:
        lines += [
            f"config for {framework}: cannot say this plan; the nearest that it can say is",
            f"  {offered.strategy}",
            f"  which takes {abs(offered.more):.1%} {'more' if offered.more >= 0 else 'less'} time"
            f"{_priced_with(offered.replaced)}",
        ]
    lines += [f"  changes results: {sentence}" for sentence in offered.changes]
    if file is None:
        return [*lines, "", offered.text.rstrip("\n")]
    write_text(file, offered.text)
    return [*lines, f"wrote {file}"]


def _priced_with(replaced: tuple[Replaced, ...]) -> str:
    """The fields whose values are not those of the config in its price."""
    words = ", ".join(f"{one.field}={one.priced}" for one in replaced)
    return f", priced with {words} as the plan has" if words else ""


def offer_json(offered: OfferedConfig | None, file: str | None) -> Mapping[str, object] | None:
    """The config that is offered, as an object for `--json`; None where none was asked for."""
    if offered is None:
        return None
    if file is not None:
        write_text(file, offered.text)
    return {
        "file": file,
        "strategy": str(offered.strategy) if offered.strategy is not None else None,
        "is_plan": offered.is_plan,
        "step_seconds": offered.seconds,
        "more": offered.more,
        "changes": list(offered.changes),
        "text": offered.text,
    }
