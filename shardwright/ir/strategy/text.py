"""The line of text of a `Strategy`: words such as `dp_shard=8`, for what is not a default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from shardwright.ir.strategy.fields import AXES, DTYPE_FIELDS, NEEDS, POSSIBLE
from shardwright.ir.strategy.recompute import Recompute, StrategyError

# Dtypes of parameters in use, of reductions of gradients, of kept gradients, and of the state.
_PRESETS = {
    "bf16": ("bfloat16", "float32", "float32", "float32"),
    "pure-bf16": ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    "fp16": ("float16", "float32", "float32", "float32"),
    "fp32": ("float32", "float32", "float32", "float32"),
    "tf32": ("tf32", "float32", "float32", "float32"),
}
_KEYS = {  # of the text, where they are not the field's name
    "mb": "micro_batches",
    "sp": "sequence_parallel",
    "reshard": "reshard_after_forward",
    "ac": "recompute",
    "cut": "stage_cut",
    "param": "param_dtype",
    "reduce": "reduce_dtype",
    "grad": "grad_dtype",
    "state": "state_dtype",
    "sync": "gradient_sync",
}
_KEY_OF = {name: key for key, name in _KEYS.items()}
_SWITCHES = {"on": True, "off": False}
_BEFORE_DTYPES = (
    *("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "pp", "micro_batches", "stage_cut"),
    *("order", "zero", "reshard_after_forward", "sequence_parallel", "async_tp", "ep_overlap"),
    *("cp_style", "recompute"),
    "offload",
)
_BEHIND = ("fp8", "fp8_gather", "compile", "loss", "mlp", "gradient_sync")


def read(text: str) -> dict[str, Any]:
    """The fields that a line gives, with values that each can have.

    Raises `StrategyError`, naming the word that cannot be read or gives a field again.
    """
    given: dict[str, Any] = {}
    for word in text.split():
        for name, value in _read(word):
            if name in given:
                raise StrategyError(f"{word!r} gives {name} again; say it once")
            given[name] = value
    return given


def written(given: Mapping[str, Any]) -> str:
    """The line of fields with values that are not their defaults."""
    words = [_written(given, name) for name in _BEFORE_DTYPES]
    words += [_written_dtypes(given), *(_written(given, name) for name in _BEHIND)]
    return " ".join(word for word in words if word)


def _read(word: str) -> Iterable[tuple[str, Any]]:
    """The fields that a word of the text gives, with their values."""
    if word in _PRESETS:
        yield from zip(DTYPE_FIELDS, _PRESETS[word], strict=True)
        return
    key, equals, text = word.partition("=")
    name = _KEYS.get(key, key)
    if not equals or name not in POSSIBLE:
        if equals and (near := _near(key)):
            meant = " or ".join(f"{one}={text}" for one in near)
            raise StrategyError(f"{word!r} is no word of a strategy; did you mean {meant}?")
        known = ", ".join([*(_KEY_OF.get(name, name) for name in POSSIBLE), *_PRESETS])
        raise StrategyError(
            f"{word!r} is no word of a strategy; write words such as {known}, as in"
            " 'dp_shard=8 tp=8 pp=2:Interleaved1F1B/v2 mb=16 ac=full bf16'"
        )
    if name == "pp":
        yield from _read_pipeline(word, text)
        return
    yield name, _value(word, name, text)


def _near(key: str) -> Iterable[str]:
    """The words that may have been meant by one that is none."""
    return ("dp_replicate", "dp_shard") if key == "dp" else get_close_matches(key, POSSIBLE, 1)


def _read_pipeline(word: str, text: str) -> Iterable[tuple[str, Any]]:
    """Of `2:Interleaved1F1B/v2`: groups, schedule and virtual stages."""
    degree, colon, rest = text.partition(":")
    schedule, slash, virtual = rest.partition("/v")
    yield "pp", _value(word, "pp", degree)
    if colon:
        yield "schedule", schedule
    if slash:
        yield "virtual_stages", _value(word, "virtual_stages", virtual)


def _value(word: str, name: str, text: str) -> Any:
    """The value of a field in the text; raises `StrategyError` for one that cannot be read."""
    if name in (*AXES, "ep", "etp", "virtual_stages", "micro_batches", "zero"):
        value: Any = int(text) if text.isdecimal() else text
    elif name in NEEDS or name in ("sequence_parallel", "reshard_after_forward"):
        value = _SWITCHES.get(text, text)
    elif name in ("order", "offload"):
        value = tuple(text.split(","))
    elif name == "stage_cut":
        value = tuple(int(n) if n.isdecimal() else -1 for n in text.split(","))
    elif name == "recompute":
        value = Recompute.parse(text)
    else:
        value = text
    if not POSSIBLE[name].holds(value):
        raise StrategyError(f"{word!r}: {name} is {POSSIBLE[name].words}")
    return value


def _written(given: Mapping[str, Any], name: str) -> str:
    """The word of a field in the text; "" where it is not given."""
    if name == "pp":
        return _written_pipeline(given)
    if name not in given:
        return ""
    key, value = _KEY_OF.get(name, name), given[name]
    if isinstance(value, bool):
        value = next(word for word, meant in _SWITCHES.items() if meant is value)
    elif isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"{key}={value}"


def _written_pipeline(given: Mapping[str, Any]) -> str:
    """Groups, schedule and virtual stages, as `2:Interleaved1F1B/v2`."""
    if not given.keys() & {"pp", "schedule", "virtual_stages"}:
        return ""
    word = f"pp={given.get('pp', 1)}"
    if "schedule" in given:
        word += f":{given['schedule']}"
    return word + (f"/v{given['virtual_stages']}" if "virtual_stages" in given else "")


def _written_dtypes(given: Mapping[str, Any]) -> str:
    """The dtypes: a preset, or those that are given."""
    dtypes = tuple(given.get(name) for name in DTYPE_FIELDS)
    for word, preset in _PRESETS.items():
        if dtypes == preset:
            return word
    return " ".join(f"{_KEY_OF[name]}={given[name]}" for name in DTYPE_FIELDS if name in given)
