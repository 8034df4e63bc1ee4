"""Parses TARGET, its sizes and its settings, without running code of the user.

It imports neither torch nor transformers, so that mistakes are reported quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwright.train.targets.config_values import check_values, read_config
from shardwright.train.targets.target_error import TargetError

_MOST_TOKENS = 2**28  # of a global batch; the largest published ones have 2**26
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/model


@dataclass(frozen=True, slots=True)
class Target:
    """TARGET as text, the sizes of a batch for a config.json, and `NAME=VALUE` settings.

    `cached` is whether the capture of a config.json may be read from the user's cache.
    """

    text: str
    batch: int | None = None
    seq: int | None = None
    settings: tuple[str, ...] = ()
    cached: bool = True

    def arguments(self) -> list[str]:
        """The worker's command-line arguments."""
        found = ["--target", self.text]
        for option, size in (("--batch", self.batch), ("--seq", self.seq)):
            found += [option, str(size)] if size is not None else []
        return [*found, *(part for text in self.settings for part in ("--set", text))]


@dataclass(frozen=True, slots=True)
class ConfigTarget:
    """A Hugging Face `config.json` and its `content`, sizes of a batch, and `given` fields.

    `batch` is a number of sequences or images, and `seq` the tokens of a sequence, None for images.
    """

    file: Path
    content: dict[str, Any]
    batch: int
    seq: int | None
    given: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FunctionTarget:
    """`file.py:function`, and the `given` arguments of the function."""

    file: Path
    function: str
    given: dict[str, Any]


def parse_target(
    target: str, batch: int | None, seq: int | None, settings: Sequence[str]
) -> ConfigTarget | FunctionTarget:
    """Parse TARGET.

    Args:
        target: `file.py:function`, a `config.json`, or a folder with one.
        batch: sequences or images in a batch, for a config only.
        seq: tokens in a sequence, for a config of a language model only.
        settings: `NAME=VALUE`: fields of the config, or arguments of the function.

    Raises:
        TargetError: the TARGET cannot be read, or sizes or settings are missing or not allowed.
    """
    given: dict[str, Any] = {}
    for name, value in map(_setting, settings):
        if name in given:
            raise TargetError(f"--set {name} is there twice; give it once")
        given[name] = value
    if (config := config_file(target)) is not None:
        batch, seq = _sizes(config, given.pop("batch", batch), given.pop("seq", seq))
        content = read_config(config)
        check_values(None, given)
        check_values(config, {**content, **given})
        return ConfigTarget(config, content, batch, seq, given)
    _check_form(target)
    if batch is not None or seq is not None:
        raise TargetError(
            f"{target} brings its own batch; --batch and --seq belong to a config.json, --set"
            " batch=… gives the function an argument"
        )
    file, _, function = target.rpartition(":")
    if not Path(file).is_file():
        raise TargetError(f"there is no file {file}; a target is file.py:function")
    return FunctionTarget(Path(file), function, given)


def config_file(target: str) -> Path | None:
    """The config file if TARGET is a `.json` file or a folder with a `config.json`, else None.

    Raises `TargetError` for a folder without one.
    """
    path = Path(target)
    if target and path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(
                f"{target} is a folder without a config.json; give one with it, or file.py:function"
            )
        return path / "config.json"
    return path if target.endswith(".json") else None


def is_integer(number: object, least: int) -> bool:
    """Whether the value is an integer of at least `least`."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _sizes(file: Path, batch: Any, seq: Any) -> tuple[int, int | None]:
    if batch is None:
        raise TargetError(
            f"{file} has no batch: give its sizes, as in --batch 8 --seq 1024, or --batch 8 for"
            " images"
        )
    if not is_integer(batch, 1) or not (seq is None or is_integer(seq, 2)):
        sizes = f"--batch {batch}" + (f" --seq {seq}" if seq is not None else "")
        raise TargetError(f"{sizes}: at least 1 sequence of 2 tokens, or 1 image, please")
    if batch * (seq or 1) > _MOST_TOKENS:
        sizes = f"--batch {batch}" + (f" --seq {seq}" if seq is not None else "")
        raise TargetError(f"{sizes}: at most {_MOST_TOKENS} tokens or images in a batch, please")
    return batch, seq


def _check_form(target: str) -> None:
    """Raise `TargetError`, with a suggestion, unless the text has the form file.py:function."""
    file, colon, function = target.rpartition(":")
    if colon and file.endswith(".py") and function:
        return
    if _HUB_NAME.fullmatch(target) and not target.endswith(".py") and not Path(target).exists():
        raise TargetError(
            f"{target!r} is no file or folder here, and nothing is fetched from a hub: download"
            " its config.json and name that file"
        )
    path = Path(file if colon else target)
    beside = [one.name for one in path.parent.glob("*")] if not path.exists() else []
    if near := get_close_matches(path.name, beside, 1):
        raise TargetError(
            f"there is no {str(path)!r}; did you mean {str(path.with_name(near[0]))!r}?"
        )
    example = f"{target}:job" if target.endswith(".py") else "train.py:job"
    raise TargetError(
        f"{target!r} is neither file.py:function nor a config.json; name the function that"
        f" returns a Job, as in {example}"
    )


def _setting(text: str) -> tuple[str, Any]:
    """The name and value of `name=value`; a value that is not JSON is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise TargetError(f"--set {text}: write it as name=value, as in --set num_layers=4")
    try:
        return name.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return name.strip(), value
