"""Makes the config object of transformers for a `config.json`, and names the field that is wrong.

The schema are transformers' config classes: dataclasses that check the types of their fields. No
field may have the name of a method or constant of its class.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from shardwright.train.targets.config_values import refused, said
from shardwright.train.targets.target_error import TargetError

# Fields about what a model returns; a training step uses its loss alone.
_RETURNED = ("use_cache", "output_attentions", "output_hidden_states")
_OLD_NAMES = ("torch_dtype",)  # which transformers takes, and has as attributes too
_FIELD = re.compile(r"Validation error for field '(\w+)'")
_SECONDS = 5.0  # for the search of the field with which no model can be made


def config_of(file: Path, data: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """The config object for the fields `data`, changed by those of `--set`.

    Args:
        file: the config, for errors.
        data: its fields.
        given: fields of `--set`.

    Raises:
        TargetError: transformers does not know the model type, or refuses a field.
    """
    known = _known_types()
    name = str(data["model_type"])
    if name not in known:
        close = ", ".join(get_close_matches(name, known, 3, 0.4) or sorted(known)[:3])
        refused(file, "model_type", name, f"give a type that transformers knows, as {close}")
    kind = known[name]
    _check_names(None, given, kind)
    _check_names(file, data, kind)
    config = _made(file, kind, data, {})
    changed = {}
    for key, value in given.items():
        if hasattr(config, key):
            changed[key] = value
        elif key not in ("image_size", "num_channels") or config.model_type not in _image_types():
            raise TargetError(unknown_setting(str(file), key, config.to_dict(), "field"))
    return _made(file, kind, {**data, **changed}, changed) if changed else config


def culprit(
    make: Callable[[Any], object], data: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[str, Any] | None:
    """The field, with its value, without which `make` takes the config; None if none is found.

    Fields of `--set` are tried first. Models are made on the meta device, for some seconds at most.
    """
    kind, end = _known_types()[str(data["model_type"])], time.monotonic() + _SECONDS
    whole = {**data, **given}
    for name in (*given, *(name for name in data if name not in given)):
        if time.monotonic() > end:
            return None
        if name in ("model_type", "architectures"):
            continue
        rest = {key: value for key, value in whole.items() if key != name}
        try:
            with torch.device("meta"):
                make(kind(**_used(rest)))
        except Exception:  # of many classes, some derived from Exception only
            continue
        return name, whole[name]
    return None


def refusal(
    file: Path,
    made: type[object],
    found: tuple[str, Any],
    given: Mapping[str, Any],
    error: Exception,
    what: str = "made",
) -> str:
    """The error text for the field `found`, with which the class cannot be made, or run."""
    key, value = found
    why = f"{made.__name__} cannot be {what} with it ({reason(error)}); give another value"
    return said(None if key in given else file, key, value, why)


def reason(error: BaseException) -> str:
    """The innermost cause of an error in one line."""
    error = _innermost(error)
    text = " ".join(str(error).split()) or "no reason is given"
    text = text if len(text) <= 300 else f"{text[:297]}..."
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def unknown_setting(owner: str, name: str, known: Iterable[str], what: str) -> str:
    """The error text for a field or argument `name` that `owner` lacks, with similar ones."""
    close = get_close_matches(name, list(known), 3, 0.4) or sorted(known)[:5]
    there = f"there are {', '.join(close)}" if close else f"it takes no {what}s"
    hint = ", and the options --machine and --optimizer" * (name in ("machine", "optimizer"))
    return f"--set {name}: {owner} has no {what} {name}; {there}{hint}"


def _known_types() -> Mapping[str, Any]:
    """The config classes of transformers by model type."""
    # Else models of some types fetch kernels from a hub where the package `kernels` is installed.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    try:
        import transformers
    except ImportError as e:
        raise TargetError("a config.json needs transformers: pip install 'shardwright[hf]'") from e
    known: Mapping[str, type] = transformers.CONFIG_MAPPING
    return known


def _image_types() -> frozenset[str]:
    """The model types for which transformers has an image classifier; imports all their configs."""
    import transformers

    known = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    return frozenset(config.model_type for config in known)


def _check_names(file: Path | None, data: Mapping[str, Any], kind: Any, prefix: str = "") -> None:
    """Check that no field, also of the configs within, hides an attribute of its config class."""
    known = _known_types()
    for name, value in data.items():
        if _hides(kind, name):
            refused(file, prefix + name, value, f"{kind.__name__} has no such field; leave it out")
        part = kind.sub_configs.get(name)
        if part is None or not isinstance(value, dict):
            continue
        if not hasattr(part, "sub_configs"):  # AutoConfig
            part = known[value["model_type"]] if value.get("model_type") in known else None
        if part is not None:
            _check_names(file, value, part, f"{prefix}{name}.")


def _hides(kind: Any, name: str) -> bool:
    """Whether `name` is an attribute of the config class that a file must not replace."""
    if name in {field.name for field in fields(kind)} or name in ("model_type", *_OLD_NAMES):
        return False
    if name in ("self", "cls") or name.startswith("__"):
        return True
    own = inspect.getattr_static(kind, name, None)
    if isinstance(own, property):
        return own.fset is None
    return callable(own) or isinstance(own, classmethod) or _is_of_all_configs(name)


def _is_of_all_configs(name: str) -> bool:
    """Whether `name` is an attribute of the base of all config classes."""
    from transformers import PreTrainedConfig

    return inspect.getattr_static(PreTrainedConfig, name, _hides) is not _hides


def _made(file: Path, kind: Any, data: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    try:
        config = kind(**_used(data))
    except Exception as e:  # of many classes, some derived from Exception only
        found = _FIELD.match(str(e))
        for key, value in _called(data, found[1]) if found is not None else ():
            refused(None if key in given else file, key, value, _needed(kind, key, e))
        if (wrong := culprit(lambda config: config, data, given)) is not None:
            raise TargetError(refusal(file, kind, wrong, given, e)) from e
        if given:
            raise TargetError(refused_settings(file, given, e)) from e
        raise TargetError(
            f"{file}: this version of transformers does not take it: {reason(e)}"
        ) from e
    config.use_cache = False  # a training step returns no keys and values
    return config


def refused_settings(file: Path, given: Mapping[str, Any], error: Exception) -> str:
    """The error text for fields of `--set` that transformers refuses, with its reason."""
    said = " ".join(f"--set {name}={value!r}" for name, value in given.items())
    return f"{said}: {file} does not take it: {reason(error)}"


def _used(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in _RETURNED and k != "model_type"}


def _called(data: Mapping[str, Any], name: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields called `name`, with their paths, at every level."""
    for key, value in data.items():
        if key == name:
            yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _called(value, name, f"{prefix}{key}.")


def _needed(kind: Any, key: str, error: Exception) -> str:
    """The type that transformers says a field must have, or what it says of its value."""
    types = {field.name: field.type for field in fields(kind)}
    if key not in types:
        return reason(error)
    found = types[key]
    words = found.__name__ if isinstance(found, type) else str(found)
    return f"{words} is needed" if isinstance(_innermost(error), TypeError) else reason(error)


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
