"""Makes the job of a Hugging Face `config.json`: random initial weights and random batches.

Language models are trained on tokens, image classifiers on images. Other architectures are refused,
because their inputs are not known.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.train.data.batch import Batch, JobError
from shardwright.train.job import Job
from shardwright.train.targets.config_schema import (
    config_of,
    culprit,
    reason,
    refusal,
    refused_settings,
)
from shardwright.train.targets.config_values import refused, said
from shardwright.train.targets.target_error import TargetError
from shardwright.train.targets.target_text import ConfigTarget, is_integer

_STEPS = 20  # enough to measure the speed
_OTHER_LABELS = ("Classification", "QuestionAnswering", "MultipleChoice", "SentencePrediction")


def config_job(target: ConfigTarget) -> Job:
    """The job that trains the config's architecture with fused AdamW.

    Raises `TargetError` if transformers refuses the config, or if its inputs are not known.
    """
    config = config_of(target.file, target.content, target.given)
    make = _architecture(target.file, config)
    example = _example(target, make, config)

    def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    return Job(
        model=lambda: _made(make, config, target),
        batch=example,
        optimizer=adamw,
        data=lambda: iter([example()]),
        steps=_STEPS,
        name=str(config.model_type),
    )


def forward_refusal(target: ConfigTarget, error: Exception) -> str | None:
    """The error text for a field of the config with which its model cannot run on its batch.

    `error` is that of the capture. None if the model runs, on the meta device, or if no single
    field is to blame.
    """
    file, given = target.file, target.given
    config = config_of(file, target.content, given)
    make = _architecture(file, config)

    def run(changed: Any) -> None:
        if hasattr(changed, "_experts_implementation"):  # the only one that needs no values
            changed._experts_implementation = "batched_mm"
        with torch.device("cpu"):  # the generator's
            batch = _example(target, make, changed)()
        assert isinstance(batch, Mapping)
        with torch.device("meta"):
            make(changed)(**{name: tensor.to("meta") for name, tensor in batch.items()})

    try:
        run(config)
    except Exception:  # of many classes
        found = culprit(run, target.content, given)
        return None if found is None else refusal(file, make, found, given, error, "run")
    return None


def _example(target: ConfigTarget, make: type[nn.Module], config: Any) -> Callable[[], Batch]:
    """The example batch of a model of the class: tokens, or images."""
    file, batch, seq = target.file, target.batch, target.seq
    takes = set(inspect.signature(make.forward).parameters)
    if {"pixel_values", "labels"} <= takes and make.__name__.endswith("ForImageClassification"):
        if seq is not None:
            raise TargetError(f"--seq {seq}: {file} takes images; leave it out")
        sizes = ((n, target.given[n]) for n in ("image_size", "num_channels") if n in target.given)
        # The config has those that are fields of it.
        return _images(file, config, batch, {n: x for n, x in sizes if not hasattr(config, n)})
    if {"input_ids", "labels"} <= takes and not make.__name__.endswith(_OTHER_LABELS):
        return _tokens(file, config, batch, seq)
    raise TargetError(
        f"{file}: what {make.__name__} is trained on is not known; write a function that"
        " returns a Job with this model and its batch, and name it as in train.py:job"
    )


def _tokens(file: Path, config: Any, batch: int, seq: int | None) -> Callable[[], Batch]:
    """Makes random tokens (batch, seq), which are their own labels."""
    if seq is None:
        raise TargetError(
            f"{file} has no batch: tokens per sequence are missing, as in --batch {batch} --seq"
            " 1024"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq > longest:
        raise TargetError(f"--seq {seq} is longer than the {longest} positions of {file}")
    words: Any = getattr(config, "vocab_size", None)
    if not is_integer(words, 1):
        raise TargetError(
            f"{file} has vocab_size {words!r}, so no tokens can be made up; give a whole number"
        )

    def example() -> Batch:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(words, (batch, seq), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return example


def _images(file: Path, config: Any, batch: int, given: Mapping[str, Any]) -> Callable[[], Batch]:
    """Makes random images (batch, channels, height, width) with one random class each.

    Channels and size are the `given` ones, else those of the config.
    """
    parts = (given, config.to_dict(), _as_dict(getattr(config, "vision_config", None)))

    def field(name: str, example: str) -> Any:
        found = next((part[name] for part in parts if part.get(name) is not None), None)
        if found is None:
            raise TargetError(f"{file} says no {name}; give it, as in --set {name}={example}")
        return found

    channels, size = field("num_channels", "3"), field("image_size", "224")
    sides = (size, size) if isinstance(size, int) else size
    if not is_integer(channels, 1):
        raise TargetError(f"{file} has num_channels {channels!r}; give a whole number, as 3")
    if not (
        isinstance(sides, list | tuple) and len(sides) == 2 and all(is_integer(n, 1) for n in sides)
    ):
        raise TargetError(f"{file} has image_size {size!r}; give pixels, as 224 or [224, 224]")
    problem = getattr(config, "problem_type", None)
    if config.num_labels < 2 or problem not in (None, "single_label_classification"):
        raise TargetError(
            f"{file} has problem_type {problem!r} and {config.num_labels} labels; made-up images"
            " have one of 2 classes or more each: write a function that returns a Job"
        )

    def example() -> Batch:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn((batch, channels, *sides), generator=generator)
        labels = torch.randint(config.num_labels, (batch,), generator=generator)
        return {"pixel_values": images, "labels": labels}

    return example


def _as_dict(config: Any) -> dict[str, Any]:
    found = config.to_dict() if hasattr(config, "to_dict") else config
    return found if isinstance(found, dict) else {}


def _architecture(file: Path, config: Any) -> type[nn.Module]:
    """The class of the config's architecture, else the causal LM or classifier of its type.

    Only classes that transformers lists for the model type are looked up, so that a name in a file
    cannot reach other code.
    """
    import transformers

    names = config.architectures or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        refused(file, "architectures", names, 'a list of names is needed, as ["ViTModel"]')
    listed = _listed_classes(config)
    for name in names:
        if name in listed:
            return listed[name]
    if names:
        known = get_close_matches(names[0], list(listed), 3, 0.4) or list(listed)[:3]
        needed = f"give a class of transformers for {config.model_type}, as {', '.join(known)}"
        refused(file, "architectures", list(names), f"{needed}, or leave it out")
    for table in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ):
        if type(config) in table:
            classes = table[type(config)]
            first: type[nn.Module] = classes[0] if isinstance(classes, tuple) else classes
            return first
    raise TargetError(
        f"{file} names no architecture, and {config.model_type} is neither a language model nor a"
        ' classifier of images; name one of its classes, as in "architectures": ["T5Model"]'
    )


def _listed_classes(config: Any) -> dict[str, type[nn.Module]]:
    """Model classes of transformers for the type of `config`, by name.

    These are the classes in transformers' tables and the other models in their modules.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    tables = [n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("_NAMES")]
    names: list[str] = []
    for table in tables:
        found = getattr(modeling_auto, table).get(config.model_type, ())
        names += [found] if isinstance(found, str) else found
    modules = {inspect.getmodule(getattr(transformers, name)) for name in names}
    names += [name for module in modules for name in getattr(module, "__all__", ())]
    classes = {name: getattr(transformers, name, None) for name in names}
    return {
        name: made
        for name, made in classes.items()
        if inspect.isclass(made)
        and issubclass(made, transformers.PreTrainedModel)
        and issubclass(made, nn.Module)  # always true; type checkers do not see it
    }


def _made(make: type[nn.Module], config: Any, target: ConfigTarget) -> nn.Module:
    try:
        return make(config).train()
    except Exception as e:
        if torch.get_default_device().type == "meta" and _is_of_meta(e):
            raise  # `build_model` tries a real device next
        file = target.file
        if (cause := _known_cause(config)) is not None:
            key, value, needed = cause
            raise JobError(said(None if key in target.given else file, key, value, needed)) from e
        if (found := culprit(make, target.content, target.given)) is not None:
            raise JobError(refusal(file, make, found, target.given, e)) from e
        if target.given:
            raise JobError(refused_settings(file, target.given, e)) from e
        raise JobError(f"{file}: {make.__name__} cannot be made: {reason(e)}") from e


def _is_of_meta(error: Exception) -> bool:
    """Whether an error is about the meta device, so that a real device may do better."""
    return isinstance(error, NotImplementedError) or bool(re.search(r"\bmeta\b", str(error)))


def _known_cause(config: Any) -> tuple[str, Any, str] | None:
    """The field that explains why a model cannot be made, its value and the requirement."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = config.to_dict()
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        act = fields.get(name)
        if isinstance(act, str) and act not in ACT2FN:
            return name, act, f"give an activation, as {_nearest(act, ACT2FN)}"
    rope = fields.get("rope_parameters")
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if isinstance(kind, str) and kind not in ("default", *ROPE_INIT_FUNCTIONS):
        return "rope_type", kind, f"give one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
    words, padding = fields.get("vocab_size"), fields.get("pad_token_id")
    if is_integer(words, 1) and isinstance(padding, int) and not -1 <= padding < words:
        return "pad_token_id", padding, f"a token below vocab_size {words} is needed"
    hidden = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(hidden, int) and isinstance(heads, int) and heads and hidden % heads:
        return "num_attention_heads", heads, f"a divisor of hidden_size {hidden} is needed"
    return None


def _nearest(name: str, known: Iterable[str]) -> str:
    return ", ".join(get_close_matches(name, list(known), 3, 0.4) or sorted(known)[:3])
