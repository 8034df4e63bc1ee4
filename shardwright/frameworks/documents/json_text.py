"""JSON files with the positions of their values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from shardwright.frameworks.documents.document import (
    DEEPEST,
    Document,
    Entry,
    Syntax,
    in_place,
    line_of,
    put,
)
from shardwright.frameworks.errors import FrameworkError

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def parse(name: str, text: str) -> Document:
    """The keys of a JSON object."""
    try:
        content = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as e:
        raise FrameworkError(f"{name}, line {e.lineno}: it is no JSON: {e.msg}") from e
    except (ValueError, RecursionError) as e:
        raise FrameworkError(
            f"{name}: it is no JSON: {str(e)[:80] or 'it nests too deeply'}"
        ) from e
    if not isinstance(content, dict):
        raise FrameworkError(f"{name}: it is a JSON {type(content).__name__}; an object is needed")
    start = _skip(text, 0)
    return Document.of(name, "json", text, _members(name, text, start, ()))


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _members(name: str, text: str, start: int, path: tuple[str, ...]) -> Iterator[Entry]:
    """The entries of the object that begins at `start`; the text is valid JSON."""
    if len(path) > DEEPEST:
        raise FrameworkError(f"{name}: sections nest more than {DEEPEST} deep")
    position = _skip(text, start + 1)
    while text[position] != "}":
        key_start = position
        key, position = _DECODER.raw_decode(text, position)
        colon = _skip(text, position)
        begin = _skip(text, colon + 1)
        value, end = _DECODER.raw_decode(text, begin)
        inner = (*path, str(key))
        if isinstance(value, dict) and value:
            yield from _members(name, text, begin, inner)
        else:
            whole = _whole(text, key_start, end)
            yield Entry(".".join(inner), value, line_of(text, key_start), (begin, end), whole)
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)


def _whole(text: str, start: int, end: int) -> tuple[int, int]:
    """A member with the comma after it, or else before it."""
    behind = _skip(text, end)
    if text[behind] == ",":
        return start, _skip(text, behind + 1)
    before = len(text[:start].rstrip())
    return (before - 1 if text[before - 1] == "," else before), end


def changed(document: Document, key: str, value: Any, _near: str | None) -> str:
    """The text with one value replaced, added or deleted."""
    text = document.text
    if (found := in_place(document, key, value, lambda _: json.dumps(value))) is not None:
        return found
    *path, last = key.split(".")
    start, missing = _deepest(text, path)
    content: Any = {last: value}
    for section in reversed(missing):
        content = {section: content}
    (first, inner), *_ = content.items()
    return _inserted(text, start, first, inner)


def _deepest(text: str, path: list[str]) -> tuple[int, list[str]]:
    """The start of the innermost existing section of a path, and the sections that are missing."""
    start = _skip(text, 0)
    for depth, section in enumerate(path):
        inside = _object_in(text, start, section)
        if inside is None:
            return start, path[depth:]
        start = inside
    return start, []


def _object_in(text: str, start: int, section: str) -> int | None:
    position = _skip(text, start + 1)
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        begin = _skip(text, _skip(text, position) + 1)
        value, end = _DECODER.raw_decode(text, begin)
        if key == section and isinstance(value, dict):
            return begin
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return None


def _inserted(text: str, start: int, key: str, value: Any) -> str:
    """The text with a member added at the end of the object that begins at `start`."""
    content, end = _DECODER.raw_decode(text, start)
    line_start = text.rfind("\n", 0, start) + 1
    outer = text[line_start:start]
    outer = outer[: len(outer) - len(outer.lstrip())]
    first = _skip(text, start + 1)
    lead = text[start + 1 : first] if content else ""
    if content and "\n" not in lead:
        lead = " "
    inner = lead.rpartition("\n")[2] if "\n" in lead else f"{outer}  "
    step = max(1, len(inner) - len(outer))
    shown = json.dumps(value, indent=step).replace("\n", f"\n{inner}")
    member = f"{json.dumps(key)}: {shown}"
    if not content:
        return put(text, (start, end), f"{{\n{inner}{member}\n{outer}}}")
    last = len(text[: end - 1].rstrip())
    return put(text, (last, last), f",{lead}{member}")


JSON = Syntax("json", parse, changed)
