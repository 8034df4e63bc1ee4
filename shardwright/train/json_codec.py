"""Encodes plain values as JSON and back, exactly.

Checkpoints store schedules, hyperparameters and positions in the data in this form, so that loading
a checkpoint never runs code.
"""

from __future__ import annotations

import base64
from collections import Counter
from math import prod
from typing import Any

import torch

_KIND = "~"  # the key of the type of an encoded object


class ValueFormatError(ValueError):
    """A value that cannot be encoded or decoded."""


def to_json(value: Any) -> Any:
    """Encode `value` as an object that `json` can write.

    Numbers, strings, None, tensors, and lists, tuples, dicts and Counters of them are supported;
    others raise `ValueFormatError`. Tensors are decoded on the host.

    >>> to_json({"betas": (0.9, 0.95), "fused": None})
    {'betas': {'~': 'tuple', 'items': [0.9, 0.95]}, 'fused': None}
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [to_json(item) for item in value]
        case tuple():
            return {_KIND: "tuple", "items": [to_json(item) for item in value]}
        case dict() if type(value) is dict and _KIND not in value and all(_texts(value)):
            return {key: to_json(item) for key, item in value.items()}
        case dict():
            kind = "counter" if isinstance(value, Counter) else "dict"
            items = [[to_json(key), to_json(item)] for key, item in value.items()]
            return {_KIND: kind, "items": items}
        case torch.Tensor():
            plain = value.detach().cpu().contiguous()
            data = base64.b64encode(plain.view(-1).view(torch.uint8).numpy().tobytes())
            name = str(plain.dtype).removeprefix("torch.")
            shape = list(plain.shape)
            return {_KIND: "tensor", "dtype": name, "shape": shape, "data": data.decode()}
    raise ValueFormatError(
        f"a checkpoint cannot hold a {type(value).__module__}.{type(value).__qualname__}; it holds"
        " numbers, texts, tensors, and lists, tuples and dicts of them"
    )


def from_json(value: Any) -> Any:
    """Decode a result of `to_json`; raises `ValueFormatError` for a damaged or unknown value."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: from_json(item) for key, item in value.items()}
    try:
        match value[_KIND]:
            case "tuple":
                return tuple(from_json(item) for item in value["items"])
            case "dict":
                return {from_json(key): from_json(item) for key, item in value["items"]}
            case "counter":
                return Counter({from_json(key): from_json(n) for key, n in value["items"]})
            case "tensor":
                return _tensor(value["dtype"], value["shape"], value["data"])
    except (KeyError, TypeError, ValueError) as e:
        raise ValueFormatError(f"a damaged value of kind {value[_KIND]!r}: {e}") from e
    raise ValueFormatError(f"a value of unknown kind {value[_KIND]!r}")


def _texts(value: dict[Any, Any]) -> list[bool]:
    return [isinstance(key, str) for key in value]


def dtype_named(name: object) -> torch.dtype:
    """The torch dtype of this `name`, such as `float32`; raises `ValueFormatError` for others."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueFormatError(f"{name!r} is no dtype")
    return found


def _tensor(dtype: object, shape: list[int], data: str) -> torch.Tensor:
    found = dtype_named(dtype)
    raw = base64.b64decode(data, validate=True)
    if len(raw) != prod(shape) * found.itemsize or any(n < 0 for n in shape):
        raise ValueFormatError(f"{len(raw)} bytes are no {dtype} of shape {shape}")
    if not raw:
        return torch.empty(shape, dtype=found)
    return torch.frombuffer(bytearray(raw), dtype=found).view(shape)
