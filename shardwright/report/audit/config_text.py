"""The text and the JSON of a config that was read: what was understood, and what was not used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any

from shardwright.frameworks.config import Batch, Key, ModelHints, Semantics, TrainingConfig
from shardwright.frameworks.world import world_split
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy

_SHOWN = 60  # characters of a value
_NAMED = 4  # keys of unknown effect


def audit_text(config: TrainingConfig, *, whole: bool) -> list[str]:
    """Lines: strategy, batch, model and semantics of a config, and its keys.

    Keys are listed if `whole`; else those that were not used for no known reason, up to a few.
    """
    devices = config.strategy.devices
    facts = [
        ("strategy", str(config.strategy)),
        ("devices", f"{devices}, outer to inner: {_axes(config)}"),
        ("batch", _batch(config.batch, config.strategy)),
        ("model", _model(config.model)),
        ("results", _semantics(config.semantics)),
    ]
    if unfit := misfit(config):
        facts.append(("does not fit", unfit))
    if not whole:
        facts.append(("keys", _counted(config)))
    facts += [("not as read", sentence) for sentence in config.differences]
    facts += [("note", sentence) for sentence in config.notes]
    lines = [f"{config.source}: {config.framework}, {config.dialect}", ""]
    lines += [f"{name:<13} {what}" for name, what in facts]
    for title, rows in (
        ("Keys that were read:", _keys(config.used) if whole else ()),
        ("Keys that were not used:", _keys(config.unused) if whole else ()),
    ):
        if shown := [f"  {row}" for row in rows]:
            lines += ["", title, *shown]
    return lines


def _counted(config: TrainingConfig) -> str:
    """Counts of keys that were read and not used, and the names of those without a reason."""
    unknown = [key for key in config.unused if not key.why]
    text = f"{len(config.used)} read, {len(config.unused)} not used"
    if unknown:
        names = ", ".join(f"{key.name} (line {key.line})" for key in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        text += f", {len(unknown)} of them without a known effect: {names}{more}"
    return f"{text} (--all lists them)"


def audit_json(config: TrainingConfig) -> dict[str, Any]:
    """A config as `audit` read it, as one JSON object."""
    return {
        "file": config.source,
        "framework": config.framework,
        "dialect": config.dialect,
        "strategy": str(config.strategy),
        "fields": {
            one.name: _plain(getattr(config.strategy, one.name)) for one in fields(Strategy)
        },
        "devices": config.strategy.devices,
        "batch": asdict(config.batch) | {"tokens": config.batch.tokens},
        "model": asdict(config.model),
        "semantics": asdict(config.semantics),
        "misfit": misfit(config),
        "differences": list(config.differences),
        "notes": list(config.notes),
        "used": [_key(key) for key in config.used],
        "unused": [_key(key) for key in config.unused],
    }


def misfit(config: TrainingConfig) -> str | None:
    """Why the strategy does not fit model or batch; None where it does, as far as they are known.

    What replicas and pipelines of unknown models need is not checked.
    """
    try:
        config.strategy.require(config.strategy.devices, config.limits)
    except StrategyError as e:
        return str(e)
    return None


def _plain(value: Any) -> Any:
    known = isinstance(value, str | int | float | bool) or value is None
    return value if known else list(value) if isinstance(value, tuple) else str(value)


def _key(key: Key) -> dict[str, Any]:
    return {
        "key": key.name,
        "line": key.line,
        "value": _plain(key.value),
        "sets": list(key.sets),
        "why": key.why,
    }


def _axes(config: TrainingConfig) -> str:
    """The degrees of all axes with more than one device, experts after them."""
    axes = config.strategy.axes or (("dp_shard", 1),)
    text = " x ".join(f"{name} {degree}" for name, degree in axes)
    if config.strategy.ep == 1 or config.framework not in ("torchtitan", "megatron"):
        return text
    experts = world_split(config.framework, config.strategy).experts
    return f"{text}; experts: " + " x ".join(f"{name} {n}" for name, n in experts if n > 1)


def _batch(batch: Batch, strategy: Strategy) -> str:
    if batch.samples is None:
        return "left to the script"
    tokens = f" of {batch.sequence} tokens" if batch.sequence else ""
    count = strategy.micro_batches
    parts = "one micro-batch" if count == 1 else f"{count} micro-batches"
    each = f" of {batch.micro}" if batch.micro else ""
    whole = f", {batch.tokens:,} tokens" if batch.tokens else ""
    return f"{batch.samples} sequences{tokens} a step in {parts}{each} on each rank{whole}"


def _model(model: ModelHints) -> str:
    sizes = ", ".join(
        f"{getattr(model, one.name)} {one.name.replace('_', ' ')}"
        for one in fields(ModelHints)
        if one.name not in ("name", "tied") and getattr(model, one.name) is not None
    )
    if model.tied is not None:
        sizes += f", {'tied' if model.tied else 'untied'} embeddings"
    return ": ".join(word for word in (model.name, sizes) if word) or "not said; give --model"


def _semantics(semantics: Semantics) -> str:
    clip = f"clipped at {semantics.clip:g}" if semantics.clip is not None else "clipping not said"
    return (
        f"loss is a mean over {semantics.loss_mean}; gradients are reduced after"
        f" {'the last' if semantics.gradient_sync == 'last' else 'every'} micro-batch, {clip}"
    )


def _keys(keys: Iterable[Key]) -> Iterator[str]:
    keys = tuple(keys)
    width = max((len(str(key.line)) for key in keys), default=0)
    for key in keys:
        value = repr(key.value)
        value = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
        said = ", ".join(dict.fromkeys(key.sets)) or key.why
        behind = f"  ({said})" if said else ""
        yield f"line {key.line:>{width}}  {key.name} = {value}{behind}"
