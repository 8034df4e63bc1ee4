"""Encodes step programs as JSON and back, exactly.

A dataclass is an object with its fields, those that have their default left out; where a field may
be of several classes, `class` names the one it is. Enumerations are their values, and tuples are
lists. Numbers that JSON lacks are objects: `{"float": "-inf"}`.

Reading checks every field and runs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, ForwardRef, Union, get_args, get_origin, get_type_hints

from shardwright.ir.graph import Arg
from shardwright.ir.layout import Mesh
from shardwright.ir.redistribution import Collective, collective_named
from shardwright.program.step.step_program import StepProgram

FORMAT = 1  # raised when an older reader would misread programs

_CLASS, _FLOAT = "class", "float"  # a keyword is no name of a field
_Reader = Callable[[Any], Any]


class ProgramError(ValueError):
    """A text that is no step program, or one that this version cannot read."""


def program_to_json(program: StepProgram) -> str:
    """`program` as one JSON object."""
    return json.dumps(program_content(program))


def program_content(program: StepProgram) -> dict[str, Any]:
    """`program` as values that `json` can write."""
    content: dict[str, Any] = {"format": FORMAT, **_encoded(program, StepProgram)}
    return content


def program_from_json(text: str) -> StepProgram:
    """The program that `program_to_json` wrote; raises `ProgramError` for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ProgramError(f"a step program that is not JSON ({e}); write it again") from e
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise ProgramError("a step program has a format number; give what `program --json` wrote")
    if data["format"] > FORMAT:
        raise ProgramError(
            f"a step program of format {data['format']}, this version reads up to {FORMAT};"
            " upgrade shardwright or write it again"
        )
    try:
        found = _reader(StepProgram)({name: data[name] for name in data if name != "format"})
    except (KeyError, TypeError, ValueError) as e:
        raise ProgramError(f"a damaged step program ({e}); write it again") from e
    assert isinstance(found, StepProgram)
    if not all(region.variants for region in found.regions):
        raise ProgramError("a damaged step program (a region has no instructions); write it again")
    return found


def _encoded(value: Any, hint: Any) -> Any:
    """`value` of a field of the type `hint`."""
    match value:
        case float() if not math.isfinite(value):
            return {_FLOAT: repr(value)}
        case Enum() | Collective():
            return value.value
        case Mesh():
            return str(value)
        case tuple():
            inner = _item_hints(_resolved(hint), len(value))
            return [_encoded(item, each) for item, each in zip(value, inner, strict=True)]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    named = {_CLASS: type(value).__name__} if len(_classes(_resolved(hint))) > 1 else {}
    content: dict[str, Any] = dict(named)
    kind: type = type(value)
    for field, each in _fields(kind):
        given = getattr(value, field.name)
        if field.default is MISSING or given != field.default:
            content[field.name] = _encoded(given, each)
    return content


@cache
def _fields(kind: type) -> list[tuple[Any, Any]]:
    """The fields of a dataclass, each with its type."""
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in fields(kind)]


def _resolved(hint: Any) -> Any:
    """`hint`, where it is the name of the recursive type of arguments, that type."""
    return Arg if hint == "Arg" or hint == ForwardRef("Arg") else hint


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _classes(hint: Any) -> dict[str, type]:
    """The dataclasses of a union, by name."""
    classes = (one for one in _members(hint) if isinstance(one, type))
    return {one.__name__: one for one in classes if is_dataclass(one) and one is not Mesh}


def _item_hints(hint: Any, count: int) -> list[Any]:
    """The types of the `count` items of a tuple of the type `hint`; of a union, its tuple's."""
    (form,) = (one for one in _members(hint) if get_origin(one) is tuple)
    items = get_args(form)
    return [items[0]] * count if items[-1] is Ellipsis else list(items)


@cache
def _reader(hint: Any) -> _Reader:
    """The function that reads values of the type `hint`; it raises `TypeError` or `ValueError`."""
    hint = _resolved(hint)
    members = _members(hint)
    if len(members) > 1:
        return _union_reader(hint)
    if hint is Mesh:
        return lambda data: Mesh.parse(_plain(data, (str,)))
    if hint is Collective:
        return lambda data: collective_named(_plain(data, (str,)))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if isinstance(hint, type) and is_dataclass(hint):
        kind: type = hint
        return lambda data: _dataclass(kind, data)
    if get_origin(hint) is tuple:
        return lambda data: _tuple(hint, data)
    return lambda data: _plain(data, (hint,))


def _union_reader(hint: Any) -> _Reader:
    classes, members = _classes(hint), _members(hint)
    plain = tuple(one for one in members if one in (NoneType, bool, int, float, str))
    tuples = [one for one in members if get_origin(one) is tuple]

    def read(data: Any) -> Any:
        if isinstance(data, dict) and _FLOAT not in data:
            if len(classes) == 1:
                (only,) = classes.values()
                return _dataclass(only, data)
            name = data.get(_CLASS)
            if name not in classes:
                raise ValueError(f"an object of class {name!r}, not one of {', '.join(classes)}")
            return _dataclass(classes[name], {k: v for k, v in data.items() if k != _CLASS})
        if isinstance(data, list) and tuples:
            return _tuple(tuples[0], data)
        return _plain(data, plain)

    return read


def _dataclass(kind: type, data: Any) -> Any:
    """A value of the dataclass `kind`."""
    if not isinstance(data, dict):
        raise TypeError(f"{data!r} where a {kind.__name__} is needed")
    known = {field.name: hint for field, hint in _fields(kind)}
    if odd := data.keys() - known.keys():
        raise ValueError(f"a {kind.__name__} with the field {min(odd)!r}")
    return kind(**{name: _reader(known[name])(value) for name, value in data.items()})


def _tuple(hint: Any, data: Any) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise TypeError(f"{data!r} where a list is needed")
    hints = _item_hints(hint, len(data))
    return tuple(_reader(each)(item) for each, item in zip(hints, data, strict=True))


def _plain(data: Any, kinds: tuple[type, ...]) -> Any:
    """A number, text or None of one of `kinds`."""
    if isinstance(data, dict) and float in kinds and data.keys() == {_FLOAT}:
        return float(_plain(data[_FLOAT], (str,)))
    if type(data) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{data!r} where a {names} is needed")
    return data
