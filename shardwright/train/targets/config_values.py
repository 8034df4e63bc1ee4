"""Reads a Hugging Face `config.json` and checks its values before a model is made from them.

A config is untrusted data: it may name code, request downloads, or give sizes that exceed any
memory. These checks need little time and memory and import neither torch nor transformers. The
schema of transformers checks the types of fields afterwards.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shardwright.ir.atomic_io import FileSizeError, read_text_up_to
from shardwright.train.targets.target_error import TargetError

_LARGEST_FILE = 2**23  # bytes; configs have a few KiB, or some hundred KiB with names of labels
_DEEPEST = 16  # levels of nested fields; configs of models with several towers have 4

# Implementations within transformers; it looks up other names on the hub.
_IMPLEMENTATIONS = {
    "attn_implementation": ("sdpa", "eager"),
    "experts_implementation": ("grouped_mm", "batched_mm", "eager"),
}
_DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")
# Fields that make transformers download weights, or load code or kernels.
_FETCHING = ("use_pretrained_backbone", "use_kernels", "trust_remote_code")
# Fields that name code of the config's author; they are dropped.
_CODE = ("auto_map", "custom_pipelines", "_auto_class")

# Fields that count modules (layers, experts), names (labels), or elements, and their limits.
_LAYERS = re.compile(r"(?:^|_)(layers|depths?|blocks)$|^(n|num)_(layer|block)$")
_LABELS = re.compile(r"^num_labels$")
_PARTS = re.compile(r"^(n|num)_(?!.*(embd|positions|ctx|inner|tokens|embeddings))")
_SIZES = re.compile(
    r"(?:^|_)(size|sizes|dims?|embd|inner|ctx|positions|embeddings|length|width|channels)$"
)
_PROBABILITY = re.compile(r"dropout(_rate|_prob|_p)?$|_pdrop$")
_LIMITS = (
    (_LAYERS, 4096),
    (_LABELS, 2**20),
    (_PARTS, 2**16),
    (_SIZES, 2**31 - 1),
)
# Required sizes of a model: the usual names, and those of GPT-2 and T5.
_POSITIVE = frozenset(
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "n_embd",
        "n_layer",
        "n_head",
        "n_positions",
        "n_ctx",
        "d_model",
        "d_ff",
        "d_kv",
        "num_layers",
        "num_heads",
        "n_layers",
        "n_heads",
        "patch_size",
        "image_size",
        "num_channels",
        "encoder_layers",
        "decoder_layers",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    )
)


def read_config(file: Path) -> dict[str, Any]:
    """The fields of a `config.json`, without those that name code.

    Raises `TargetError` unless it is a regular file of a few MiB with a JSON object that has a
    `model_type` and is not nested too deeply.
    """
    try:
        data = json.loads(read_text_up_to(file, _LARGEST_FILE))
    except (OSError, UnicodeDecodeError, FileSizeError, ValueError, RecursionError) as e:
        reason = getattr(e, "strerror", None) or e
        raise TargetError(f"cannot read {file}: {reason}; give a Hugging Face config.json") from e
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise TargetError(f"{file} names no model_type; give a Hugging Face config.json")
    if _depth(data, _DEEPEST) > _DEEPEST:
        raise TargetError(
            f"{file} is nested more than {_DEEPEST} levels deep; give a Hugging Face config.json"
        )
    return _without_code(data)


def check_values(file: Path | None, data: Mapping[str, Any]) -> None:
    """Raise `TargetError` for the first value that is impossible, or names code or a download.

    Args:
        file: the config, for the error; None: `data` are settings of `--set`.
        data: the fields.
    """
    for key, value in _fields(data):
        name = key.rpartition(".")[2]
        _check_named(file, key, name, value)
        _check_size(file, key, name, value)
    for part in (data, *(x for x in data.values() if isinstance(x, dict))):
        _check_groups(file, part)


def refused(file: Path | None, key: str, value: object, needed: str) -> NoReturn:
    """Raise `TargetError` with the field's value, in the file or of `--set`, and what is needed."""
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else text[:57] + "..."
    where = f"--set {key}={shown}: " if file is None else f"{file}: {key} is {shown}; "
    raise TargetError(where + needed)


def _check_named(file: Path | None, key: str, name: str, value: Any) -> None:
    """Check fields that name an implementation or dtype or start a download, and real numbers."""
    known = _IMPLEMENTATIONS.get(name.removeprefix("_").removesuffix("_internal"))
    if known is not None and value is not None:
        names = value.values() if isinstance(value, dict) else (value,)
        if any(found is not None and found not in known for found in names):
            refused(file, key, value, f"give one of {', '.join(known)}, or leave it out")
    if name in _FETCHING and value:
        refused(file, key, value, "nothing is fetched from a hub; give false")
    named = isinstance(value, str) and name in ("dtype", "torch_dtype")
    if named and value.removeprefix("torch.") not in _DTYPES:
        refused(file, key, value, f"give one of {', '.join(_DTYPES[:4])}")
    if isinstance(value, float) and not math.isfinite(value):
        refused(file, key, value, "a finite number is needed")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if _PROBABILITY.search(name) and not 0 <= value <= 1:
            refused(file, key, value, "a probability from 0 to 1 is needed")
        if name.endswith(("_eps", "_epsilon")) and value < 0:
            refused(file, key, value, "a number of 0 or more is needed")


def _check_size(file: Path | None, key: str, name: str, value: Any) -> None:
    """Check that a count is within its limits."""
    most = next((limit for words, limit in _LIMITS if words.search(name)), None)
    needed = name in _POSITIVE
    if most is None and not needed:
        return
    most = most or _LIMITS[-1][1]
    numbers = value if isinstance(value, list) else [value]
    if needed and any(isinstance(n, bool | float | str) for n in numbers):
        refused(file, key, value, "a whole number of 1 or more is needed")
    # In fields outside of `_POSITIVE`, -1 and -2 may mean none, or count from the end.
    for n in numbers:
        if isinstance(n, int) and ((needed and n < 1) or n > most):
            refused(file, key, value, f"a whole number from {int(needed)} to {most} is needed")


def _check_groups(file: Path | None, part: Mapping[str, Any]) -> None:
    """Check that the number of key heads divides that of query heads, if both are given."""
    heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        refused(file, "num_key_value_heads", groups, f"a divisor of the {heads} heads is needed")


def _fields(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its path, such as `text_config.hidden_size`, at every level."""
    for name, value in data.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")


def _without_code(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_code(value) if isinstance(value, dict) else value
        for name, value in data.items()
        if name not in _CODE
    }


def _depth(value: object, most: int) -> int:
    """Levels of nesting, with a plain value as one; at most `most` + 2 levels are visited."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if most < 0:
        return 1
    return 1 + max((_depth(part, most - 1) for part in parts), default=0)
