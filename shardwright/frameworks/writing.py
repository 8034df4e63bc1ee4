"""Writes training configs of other frameworks, and edits existing ones in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Batch, TrainingConfig
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.documents.forms import edited, parse_document
from shardwright.frameworks.documents.python_text import Code
from shardwright.frameworks.documents.toml_text import literal
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.readers import torchtitan as titan
from shardwright.frameworks.reading import no_companion, read_document
from shardwright.frameworks.registry import FRAMEWORKS
from shardwright.frameworks.writers import deepspeed, hugging_face, megatron, torchtitan
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.ir.strategy.strategy import Strategy

Keys = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """A config that was written.

    Attributes:
        text: of the file.
        strategy: what the file says; the wanted one where `reasons` is empty.
        reasons: what the framework cannot express of the wanted strategy, one sentence each.
        config: the file as it is read again.
    """

    text: str
    strategy: Strategy
    reasons: tuple[str, ...]
    config: TrainingConfig


@dataclass(frozen=True, slots=True)
class Writer:
    """Functions that write one framework's config.

    Attributes:
        nearest: of a strategy, the nearest that can be expressed, and the reasons.
        settings: the keys that say an expressible strategy.
        text: of a new file with these keys.
        reads_as: the name under which `read_text` reads it.
        derived: keys that follow from others where they are not given.
    """

    nearest: Callable[[Strategy, ConfigFacts], tuple[Strategy, list[str]]]
    settings: Callable[[Strategy, ConfigFacts], Keys]
    text: Callable[[Keys, Strategy, ConfigFacts], str]
    reads_as: str
    derived: tuple[str, ...] = ()


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections in sections, without those that are None."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        if value is not None:
            *path, last = key.split(".")
            inside = found
            for section in path:
                inside = inside.setdefault(section, {})
            inside[last] = value
    return found


def _toml(keys: Keys, _strategy: Strategy, facts: ConfigFacts) -> str:
    family, _, size = (facts.model or "").partition(" ")
    if size:
        keys = {"model.name": family, "model.flavor": size, **keys}
    sections: dict[str, list[str]] = {}
    for key, value in keys.items():
        if value is not None:
            section, _, last = key.rpartition(".")
            sections.setdefault(section, []).append(f"{last} = {literal(value)}")
    return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"


def _yaml(keys: Keys, _strategy: Strategy, _facts: ConfigFacts) -> str:
    return str(yaml.safe_dump(nested(keys), sort_keys=False))


def _json(keys: Keys, _strategy: Strategy, _facts: ConfigFacts) -> str:
    return json.dumps(nested(keys), indent=2) + "\n"


def _titan(dialect: str, text: Callable[[Keys, Strategy, ConfigFacts], str]) -> Writer:
    return Writer(
        lambda strategy, facts: torchtitan.nearest(strategy, facts, dialect),
        lambda strategy, facts: torchtitan.settings(strategy, facts, dialect),
        text,
        "torchtitan",
        ("training.global_batch_size", "training.num_tokens_per_train_step"),
    )


def _function(keys: Keys, _strategy: Strategy, facts: ConfigFacts) -> str:
    return torchtitan.function_text(keys, facts)


WRITERS: Mapping[str, Writer] = {
    "torchtitan": _titan(titan.TOKENS, _function),
    "torchtitan-0.3": _titan(titan.SEQUENCES, _function),
    "torchtitan-toml": _titan(titan.TOML, _toml),
    "megatron": Writer(
        lambda strategy, facts: megatron.nearest(strategy, facts, bridge=False),
        megatron.settings,
        lambda keys, strategy, _facts: megatron.script_text(keys, strategy),
        "megatron",
        ("global-batch-size",),
    ),
    "megatron-bridge": Writer(
        lambda strategy, facts: megatron.nearest(strategy, facts, bridge=True),
        megatron.bridge_settings,
        _yaml,
        "megatron-bridge",
        ("train.global_batch_size",),
    ),
    "accelerate": Writer(
        hugging_face.nearest_accelerate,
        hugging_face.accelerate_settings,
        _yaml,
        "accelerate",
        hugging_face.VERSION_2,
    ),
    "deepspeed": Writer(deepspeed.nearest, deepspeed.settings, _json, "deepspeed"),
    "trainer": Writer(
        hugging_face.nearest_trainer, hugging_face.trainer_settings, _json, "trainer"
    ),
}
_DIALECTS = {
    titan.TOML: "torchtitan-toml",
    titan.SEQUENCES: "torchtitan-0.3",
    titan.TOKENS: "torchtitan",
}


def write_config(framework: str, strategy: Strategy, facts: ConfigFacts) -> Written:
    """A new config of a framework that trains as `strategy` does, or as nearly as it can.

    Args:
        framework: a key of `WRITERS`.
        strategy: the wanted strategy.
        facts: batch, model and clipping.

    Raises:
        FrameworkError: for an unknown framework, or where no expressible strategy is near.
    """
    if framework not in WRITERS:
        raise FrameworkError(f"the framework {framework!r} is none of {', '.join(WRITERS)}")
    writer = WRITERS[framework]
    near, reasons = writer.nearest(strategy, facts)
    text = writer.text(writer.settings(near, facts), near, facts)
    config = _read_back(parse_document(framework, text), writer, near, facts)
    return Written(text, near, tuple(reasons), config)


def convert_config(config: TrainingConfig, framework: str, strategy: Strategy) -> Written:
    """A new config of another framework, of the batch, model and clipping of one that was read.

    What changes the results of training beside the strategy is among the reasons. Otherwise as
    `write_config`.
    """
    facts = ConfigFacts(
        batch=config.batch,
        model=config.model.name,
        layers=config.model.layers,
        clip=config.semantics.clip,
    )
    written = write_config(framework, strategy, facts)
    reasons, again = list(written.reasons), written.config
    before, after = config.semantics, again.semantics
    if before.loss_mean != after.loss_mean:
        reasons.append(
            f"results change: the loss is a mean over {after.loss_mean}, not {before.loss_mean}"
        )
    if before.clip != after.clip:
        now, then = (
            "what its script says" if clip is None else f"{clip:g}"
            for clip in (after.clip, before.clip)
        )
        reasons.append(f"results may change: gradients are clipped at {now}, not {then}")
    if again.batch.samples is None and config.batch.samples is not None:
        reasons.append(f"the batch of {config.batch.samples} sequences stands in its script")
    return replace(written, reasons=tuple(reasons))


def edit_config(
    document: Document, config: TrainingConfig, strategy: Strategy, batch: Batch | None = None
) -> Written:
    """The text of a config that was read, changed so that it trains as `strategy` does.

    Only keys that say a difference between both strategies are changed, added or deleted; comments,
    order and all other keys stay. The global batch stays as it is.

    Args:
        document: the file.
        config: what was read from it.
        strategy: the wanted strategy.
        batch: of the step, where the file does not say it; None: the file's.

    Raises:
        FrameworkError: where the framework's configs are not written, or a key stands where it
            cannot be changed.
    """
    name = _DIALECTS.get(config.dialect, config.framework)
    if name not in WRITERS:
        raise FrameworkError(
            f"{config.source}: configs of {config.framework} are read and not written; write one of"
            f" {', '.join(WRITERS)}"
        )
    writer = WRITERS[name]
    facts = ConfigFacts(
        batch=batch or config.batch,
        model=config.model.name,
        layers=config.model.layers,
    )
    near, reasons = writer.nearest(strategy, facts)
    before, after = _keys(writer, config, facts), writer.settings(near, facts)
    spelled = _spelling(document, config.framework)
    changes = {
        spelled(key): after.get(key)
        for key in (*before, *after)
        if before.get(key) != after.get(key)
    }
    for key, value in changes.items():
        if isinstance(value, Code) and document.form != "python":
            raise FrameworkError(f"{document.name}: {key} is an object of Python; write a new file")
    anchor = next((spelled(key) for key in after if spelled(key) in document.entries), None)
    derived = {
        spelled(key): after[key]
        for key in writer.derived
        if key in after and spelled(key) not in document.entries
    }
    new = edited(document, changes, anchor)
    if derived and not _says(new, writer, near, facts):
        new = edited(document, {**changes, **derived}, anchor)
    return Written(new.text, near, tuple(reasons), _read_back(new, writer, near, facts))


def _says(document: Document, writer: Writer, wanted: Strategy, facts: ConfigFacts) -> bool:
    try:
        _read_back(document, writer, wanted, facts)
    except FrameworkError:
        return False
    return True


def _keys(writer: Writer, config: TrainingConfig, facts: ConfigFacts) -> Keys:
    """The keys that say what the file says now."""
    now, _ = writer.nearest(config.strategy, facts)
    return writer.settings(now, facts)


def _spelling(document: Document, framework: str) -> Callable[[str], str]:
    """A file's spelling of a framework's key: as it stands there, or as its other keys do."""
    known = FRAMEWORKS[framework].settings(document)
    flags = framework == "megatron" and document.form == "yaml"
    inside = any(key.startswith("MODEL_ARGS.") for key in document.entries)
    prefix = ("MODEL_ARGS.--" if inside else "--") if flags else ""
    return lambda key: known.spelled(key) or f"{prefix}{key}"


def _read_back(
    document: Document, writer: Writer, wanted: Strategy, facts: ConfigFacts
) -> TrainingConfig:
    """The config that a written file contains.

    Raises `FrameworkError` unless strategy, batch and clipping are what was wanted, as far as the
    framework's files say them.
    """
    config = read_document(document, writer.reads_as, wanted.devices, no_companion)
    if config.strategy != canonical(wanted):
        raise FrameworkError(
            f"{document.name}: its other keys contradict the wanted strategy: it would be read as"
            f" '{config.strategy}' and not as '{canonical(wanted)}'; write a new file"
        )
    for what, said, given in (
        ("sequences a step", config.batch.samples, facts.batch.samples),
        ("tokens a sequence", config.batch.sequence, facts.batch.sequence),
        ("as the norm of clipping", config.semantics.clip, facts.clip),
    ):
        if said is not None and given is not None and said != given:
            raise FrameworkError(
                f"{document.name}: it would have {said} {what}, not {given}; write a new file"
            )
    return config
