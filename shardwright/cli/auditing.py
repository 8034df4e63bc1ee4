"""From another framework's config to its model, its price, and an improved config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.console import working
from shardwright.cli.errors import UsageError
from shardwright.cli.planning import capturing, searching
from shardwright.frameworks.architecture import config_json
from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import ModelHints, TrainingConfig
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.models import FLAVORS, flavor, model_of_config
from shardwright.frameworks.reading import load_document
from shardwright.frameworks.semantics import changed_results
from shardwright.frameworks.writing import Written, edit_config
from shardwright.ir.options.mixed_precision import HALF_DTYPES, MASTER
from shardwright.ir.options.plan_options import ALL, PlanOptions
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.audit.auditor import Auditor, Priced, PricedChange
from shardwright.planner.audit.priced_as import Replaced, merged, priced_as
from shardwright.planner.memory_limits import limit_on
from shardwright.planner.strategies.recognition import strategy_of
from shardwright.planner.strategies.unpriced import mixed_precision
from shardwright.report.audit.price_text import Best, ConfigPrices, Improved
from shardwright.train.targets.capture_cache import capture_key
from shardwright.train.targets.config_values import check_values, read_config
from shardwright.train.targets.target_text import ConfigTarget

if TYPE_CHECKING:
    from torch import nn

    from shardwright.train.job import Job

# Frameworks that run models of transformers as they are, with norms of single operators.
_RUN_TRANSFORMERS = ("accelerate", "axolotl", "deepspeed", "llama-factory", "trainer")
# Frameworks whose own loss casts half-precision logits; of others a compiler fuses the cast.
_CAST_IN_LOSS = ("megatron", "megatron-bridge")
SEARCHES = ("near", "all", "none")  # on the mesh of the best uniform strategy, on all, on none
_GAIN = 5e-3  # of a step's time: a file that is faster by less is not written
_ENUMERATED = (  # fields in which the uniform strategies that are enumerated differ
    *("dp_replicate", "dp_shard", "zero", "tp", "cp", "pp", "micro_batches", "recompute"),
    "reshard_after_forward",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as `--model` gives it: its sizes, and a `config.json` if it is one."""

    hints: ModelHints
    fields: dict[str, Any] | None = None
    name: str = ""


def model_named(text: str) -> Model:
    """The model of a config.json, or of a flavor; raises `UsageError` for another text."""
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if path.suffix == ".json" or path.is_file():
        return Model(model_of_config(load_document(path)), read_config(path), text)
    known = flavor(None, text)
    if known.layers is None:
        raise UsageError(
            f"the model {text!r} is no config.json and none of {', '.join(map(str, FLAVORS))}"
        )
    return Model(known)


def with_batch(found: TrainingConfig, batch: int | None, seq: int | None) -> TrainingConfig:
    """The config with sizes of the batch that the file leaves to its script.

    Raises `UsageError` where the file has another size.
    """
    known = found.batch
    for option, given, said in (("--batch", batch, known.samples), ("--seq", seq, known.sequence)):
        if given is not None and said is not None and given != said:
            raise UsageError(f"{option} {given}: {found.source} says {said}; leave it out")
    sizes = replace(known, samples=batch or known.samples, sequence=seq or known.sequence)
    semantics = replace(found.semantics, global_batch=sizes.samples)
    return replace(found, batch=sizes, semantics=semantics)


def captured_model(
    found: TrainingConfig, model: Model | None, optimizer: str | None, *, cached: bool
) -> capturing.CapturedTarget:
    """The graph of a training step of the config's model on its global batch.

    If it is `cached`, it is read from the user's cache, or kept there.

    Raises `UsageError` where model or batch are not known.
    """
    samples, tokens = _sizes(found)
    if model is not None and model.fields is not None:
        name, fields = model.name, model.fields
    else:
        name = found.model.name or found.source
        try:
            fields = config_json(found.model, tokens)
        except FrameworkError as e:
            raise UsageError(f"{found.source}: {e}") from e
    target = ConfigTarget(Path(name), fields, samples, tokens, {})
    strategy = found.strategy
    is_half = strategy.param_dtype in HALF_DTYPES
    all_half = is_half and strategy.state_dtype != MASTER
    others = (is_half and not all_half) or strategy.param_dtype == "tf32"
    mixed = {**(mixed_precision(strategy) if others else {}), **kernels_of(found)}

    def load() -> Job:
        from shardwright.train.targets.hf_config import config_job

        return _in_half(config_job(target)) if all_half else config_job(target)

    def make() -> capturing.CapturedTarget:
        return capturing.capture_job(load(), optimizer, numerics=mixed)

    with working(f"capturing {name}"):
        check_values(Path(name), fields)
        if not cached:
            return make()
        options = {**mixed, "parameters": "bfloat16"} if all_half else mixed
        key = capture_key(target, options, optimizer, fast_halves=())
        return capturing.kept_or_made(key, load, make)


def kernels_of(found: TrainingConfig) -> dict[str, str]:
    """Options of `capture` for norms and casts of logits that the config's framework runs."""
    kernels = {}
    if found.framework in _RUN_TRANSFORMERS:
        kernels["norms"] = "model"
    if found.strategy.compile == "off" and found.framework not in _CAST_IN_LOSS:
        kernels["logits"] = "model"
    return kernels


def _sizes(found: TrainingConfig) -> tuple[int, int]:
    """Sequences of the global batch, and tokens of one."""
    samples, tokens = found.batch.samples, found.batch.sequence
    missing = []
    if samples is None:
        missing.append("--batch with the sequences of a step on all devices together")
    if tokens is None:
        missing.append("--seq with the tokens of a sequence")
    if samples is None or tokens is None:
        raise UsageError(
            f"{found.source} leaves the batch to its script; to price it give"
            f" {', and '.join(missing)}"
        )
    return samples, tokens


def _in_half(job: Job) -> Job:
    """The job with all parameters in bfloat16."""

    def made() -> nn.Module:
        import torch

        model: nn.Module = job.model()
        return model.to(torch.bfloat16)

    return replace(job, model=made)


@dataclass(frozen=True, slots=True)
class PricingOptions:
    """The machine and the options of prices.

    Attributes:
        machine: the hardware.
        memory_limit: as in `Frontier.fastest`.
        optimizer: its name; None: AdamW.
        searched: which plans that are not uniform are searched, one of `SEARCHES`.
        whole: whether all single changes are simulated, and what takes the memory of other plans.
        cached: whether the capture is kept in the user's cache, and read from it.
    """

    machine: Machine
    memory_limit: int | str | None = None
    optimizer: str | None = None
    searched: str = SEARCHES[0]
    whole: bool = False
    cached: bool = False


class Audit:
    """ConfigPrices one config, what would be better, and the config with that in it."""

    def __init__(self, found: TrainingConfig, model: Model | None, pricing: PricingOptions) -> None:
        self.found = found
        self.pricing = pricing
        self.captured = captured_model(found, model, pricing.optimizer, cached=pricing.cached)
        machine = pricing.machine
        self.auditor = Auditor(
            self.captured.graph,
            machine,
            self.captured.optimizer,
            self.captured.tracer(machine),
            limit_on(machine, pricing.memory_limit),
        )
        self._as: Strategy
        self._replaced: tuple[Replaced, ...]
        self._as, self._replaced = priced_as(found.strategy, self.captured.graph, machine)

    def prices(self) -> ConfigPrices:
        """All prices of the config."""
        machine, auditor = self.pricing.machine, self.auditor
        base, misfit = None, ""
        with working(f"pricing {self.found.source} on {machine}"):
            try:
                base = auditor.with_causes(auditor.price(self._as))
            except StrategyError as e:
                misfit = str(e)
            every = self.pricing.whole
            changes = auditor.changes(base, every=every) if base is not None else ()
        with working(f"pricing strategies on {machine}") as progress:
            try:
                best = auditor.uniform(self._as, progress)
            except StrategyError:  # the batch divides over no strategy's ranks
                best = None
        if base is not None and auditor.fits(base.plan.peak_bytes):
            best = min(filter(None, (base, best)), key=lambda one: one.plan.step_seconds)
        if base is not None:
            best = self._changed(base, changes, best)
        beyond = self._beyond(best)
        if self.pricing.whole and best is not None:
            best = auditor.with_causes(best)
        return ConfigPrices(
            machine=machine,
            limit=auditor.limit,
            tokens=self.found.batch.tokens or 0,
            replaced=self._replaced,
            base=base,
            misfit=misfit,
            changes=changes,
            uniform=self._best(best) if best is not None else None,
            beyond=beyond,
            searched=self.pricing.searched,
        )

    def _changed(
        self, base: Priced, changes: tuple[PricedChange, ...], best: Priced | None
    ) -> Priced | None:
        """The best strategy, or a single change of the config that is faster and fits.

        The enumeration leaves out strategies whose tables, which add up memory that is not needed
        at the same time, are above the limit.
        """
        known = base if best is None else best
        least = 1 - known.plan.step_seconds / base.plan.step_seconds
        for one in changes:
            if one.fits and one.is_simulated and one.change.field in _ENUMERATED:
                if best is not None and one.gain <= least:
                    return best
                changed = self.auditor.price(one.change.strategy)
                return min(filter(None, (best, changed)), key=lambda one: one.plan.step_seconds)
        return best

    def _best(self, best: Priced) -> Best:
        """The best strategy in the words of the file, with what it would change in results."""
        try:
            wanted = canonical(merged(self.found.strategy, self._as, best.strategy))
        except StrategyError:  # of fields that are not priced
            wanted = best.strategy
        return Best(wanted, best.plan, changed_results(self.found, wanted))

    def _beyond(self, best: Priced | None) -> Plan | None:
        """The best plan of the search that is wanted; None if nothing was searched."""
        if self.pricing.searched == "none" or (self.pricing.searched == "near" and best is None):
            return None
        if self.pricing.searched == "near":
            assert best is not None
            with working(f"searching plans like {best.strategy}"):
                return self.auditor.beyond(best.strategy)
        options = PlanOptions.of(memory_limit=self.pricing.memory_limit, micro_batches=ALL)
        frontier = searching.search(self.captured, self.pricing.machine, options)
        found, like = frontier.fastest_compared(self.pricing.memory_limit), self._as
        if like.compile == "off" and like.fp8 is None:
            return found
        near, further = strategy_of(found), None  # a search compiles nothing, and has no fp8
        if near is not None:
            near = near.but(compile=like.compile).in_8_bit(like.fp8, gathers=like.fp8_gather)
            with working(f"searching plans like {near}"):
                further = self.auditor.beyond(near)
        return found if further is None and like.fp8 is None else further

    def improved(self, document: Document, prices: ConfigPrices) -> Improved | None:
        """The fastest that the file's format can say with the same results; None: nothing is."""
        files: dict[Strategy, Written] = {}
        machine = self.pricing.machine

        def allowed(proposal: Strategy) -> Strategy | None:
            try:
                wanted = canonical(merged(self.found.strategy, self._as, proposal))
                written = edit_config(document, self.found, wanted, self.found.batch)
                if changed_results(self.found, written.strategy):
                    return None
                priced, _ = priced_as(written.strategy, self.captured.graph, machine)
            except (FrameworkError, StrategyError):
                return None
            files.setdefault(priced, written)
            return priced

        starts = [self._as]
        if prices.uniform is not None:
            starts.append(priced_as(prices.uniform.strategy, self.captured.graph, machine)[0])
        with working(f"improving {self.found.source}"):
            best = self.auditor.best_among(starts, allowed)
        if best is None:
            return None
        base = prices.base if prices.fits else None
        if base is not None and best.plan.step_seconds > (1 - _GAIN) * base.plan.step_seconds:
            return None
        return Improved(files[best.strategy], best.plan)
