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
# Model types whose layers are made by timm, which downloads the one that a config names.
_OTHER_LIBRARY = re.compile(r"^timm_")
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
_WIDTHS = re.compile(r"(?:^|_)(hidden|embed|embedding|emb)_(sizes?|dims?)$|^(dim|d_model|n_embd)$")
_ROPE = ("rope_scaling", "rope_parameters")
# Numbers of rotary embeddings that divide, or are divided by.
_ROPE_FACTORS = re.compile(
    r"^(rope_theta|.*factor|beta_(fast|slow)|original_max_position_embeddings)$"
)
_MOST_PIXELS = 2**26  # values of one image; 4096 x 4096 in four channels

# Required sizes of a model: the usual names, and those of GPT-2 and T5.
_POSITIVE = frozenset(
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "moe_intermediate_size",
        "n_embd",
        "n_inner",
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
    found: dict[str, Any] = _without_code(data)
    return found


def check_values(file: Path | None, data: Mapping[str, Any]) -> None:
    """Raise `TargetError` for the first value that is impossible, or names code or a download.

    Args:
        file: the config, for the error; None: `data` are settings of `--set`.
        data: the fields.
    """
    for key, value in _fields(data):
        name = key.rpartition(".")[2]
        _check_named(file, key, name, value)
        _check_number(file, key, name, value)
        _check_size(file, key, name, value)
    _check_image(file, data)
    for part in (data, *(x for x in data.values() if isinstance(x, dict))):
        _check_groups(file, part)


def refused(file: Path | None, key: str, value: object, needed: str) -> NoReturn:
    """Raise `TargetError` with the field's value, in the file or of `--set`, and what is needed."""
    raise TargetError(said(file, key, value, needed))


def said(file: Path | None, key: str, value: object, needed: str) -> str:
    """The error text for a field: the file or `--set`, the key, its value, and what is needed."""
    shown, key = _short(json.dumps(value, default=str)), _short(key)
    return (f"--set {key}={shown}: " if file is None else f"{file}: {key} is {shown}; ") + needed


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _check_named(file: Path | None, key: str, name: str, value: Any) -> None:
    """Check fields that name an implementation, a dtype or a library, or start a download."""
    known = _IMPLEMENTATIONS.get(name.removeprefix("_").removesuffix("_internal"))
    if known is not None and value is not None:
        names = value.values() if isinstance(value, dict) else (value,)
        if any(found is not None and found not in known for found in names):
            refused(file, key, value, f"give one of {', '.join(known)}, or leave it out")
    if name in _FETCHING and value:
        refused(file, key, value, "nothing is fetched from a hub; give false")
    if name == "model_type" and isinstance(value, str) and _OTHER_LIBRARY.search(value):
        refused(file, key, value, "timm may fetch what it names; write a function that makes it")
    named = name.endswith("dtype") and (isinstance(value, str) or key in ("dtype", "torch_dtype"))
    if named and value is not None and str(value).removeprefix("torch.") not in _DTYPES:
        refused(file, key, value, f"give one of {', '.join(_DTYPES[:4])}")
    if name == "quantization_config" and not isinstance(value, dict | None):
        refused(file, key, value, "an object with fields is needed, or leave it out")


def _check_number(file: Path | None, key: str, name: str, value: Any) -> None:
    """Check that a real number is finite, and probabilities and factors are in their ranges."""
    if isinstance(value, float) and not math.isfinite(value):
        refused(file, key, value, "a finite number is needed")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        if _PROBABILITY.search(name) and not 0 <= value <= 1:
            refused(file, key, value, "a probability from 0 to 1 is needed")
        if name.endswith(("_eps", "_epsilon")) and value < 0:
            refused(file, key, value, "a number of 0 or more is needed")
    if _ROPE_FACTORS.search(name) and (name == "rope_theta" or key.startswith(_ROPE)):
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            wrong = isinstance(number, bool) or not isinstance(number, int | float | None)
            if wrong or (number is not None and number <= 0):
                refused(file, key, value, "a number above 0 is needed")


def _check_image(file: Path | None, data: Mapping[str, Any]) -> None:
    """Check that one image has no more values than batches can be made of."""
    size, channels = data.get("image_size"), data.get("num_channels", 3)
    sides = size if isinstance(size, list) and len(size) == 2 else [size, size]
    patch, numbers = data.get("patch_size"), [*sides, channels]
    whole = [n for n in sides if isinstance(n, int)]
    if isinstance(patch, int) and whole and patch > min(whole):
        refused(file, "patch_size", patch, f"at most image_size {min(whole)} is needed")
    if all(isinstance(n, int) for n in numbers) and math.prod(numbers) > _MOST_PIXELS:
        needed = f"at most {_MOST_PIXELS} values in an image of {channels} channels are needed"
        refused(file, "image_size", size, needed)


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
        if isinstance(n, int) and (n < (1 if needed else -2) or n > most):
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
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from _fields(part, f"{prefix}{name}.")


def _without_code(value: Any) -> Any:
    """`value` without the fields, at every level, that name code."""
    if isinstance(value, list):
        return [_without_code(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_code(part) for name, part in value.items() if name not in _CODE}


def _depth(value: object, most: int) -> int:
    """Levels of nesting, with a plain value as one; at most `most` + 2 levels are visited."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if most < 0:
        return 1
    return 1 + max((_depth(part, most - 1) for part in parts), default=0)


def unnamed_sizes(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Sizes that no field of a config without a number of layers names.

    Transformers takes its defaults for them. Configs of some convolutional networks name no width.

    >>> unnamed_sizes({"model_type": "llama", "hidden_size": 4096})
    ('number of layers',)
    """
    keys = [name.rpartition(".")[2] for name, _ in _fields(content)]
    if any(map(_LAYERS.search, keys)):
        return ()
    width = any(map(_WIDTHS.search, keys))
    return ("number of layers",) if width else ("number of layers", "width")
