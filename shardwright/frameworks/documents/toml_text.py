"""TOML files with the positions of their values; `tomllib` reads the values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.frameworks.documents.document import (
    Document,
    Entry,
    Syntax,
    in_place,
    line_end,
    line_of,
    not_editable,
    put,
)
from shardwright.frameworks.errors import FrameworkError

_HEADER = re.compile(r"[ \t]*(\[\[?)([^\[\]\n]+)\]\]?[ \t]*(#.*)?$", re.MULTILINE)
_PART = r"(?:[\w-]+|\"[^\"\n]*\"|'[^'\n]*')"
_KEY = re.compile(rf"[ \t]*({_PART}(?:[ \t]*\.[ \t]*{_PART})*)[ \t]*=[ \t]*")
_MOST_LINES = 400  # of one value


def parse(name: str, text: str) -> Document:
    """The keys of a TOML file."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise FrameworkError(f"{name}: it is no TOML: {e}") from e
    except (ValueError, RecursionError) as e:  # numbers of thousands of digits, nested brackets
        raise FrameworkError(f"{name}: it is no TOML: a value cannot be read") from e
    return Document.of(name, "toml", text, _entries(name, text))


def _entries(name: str, text: str) -> Iterator[Entry]:
    """The entries of a valid file, line by line."""
    section: tuple[str, ...] = ()
    position = 0
    while position < len(text):
        end = line_end(text, position)
        header, key = _HEADER.match(text, position), _KEY.match(text, position)
        if header and header.end() == end:
            section = _path(header[2])
            # An empty section is a fact of its own: it says nothing, and is there.
        elif key:
            span, value = _value(name, text, key.end())
            path = (*section, *_path(key[1]))
            end = line_end(text, span[1])
            whole = (position, min(end + 1, len(text)))
            yield from _flat(path, value, line_of(text, position), span, whole)
        position = end + 1


def _path(text: str) -> tuple[str, ...]:
    """The parts of a dotted key."""
    content: Any = tomllib.loads(f"{text} = 0")
    path = []
    while isinstance(content, dict):
        ((part, content),) = content.items()
        path.append(part)
    return tuple(path)


def _value(name: str, text: str, start: int) -> tuple[tuple[int, int], Any]:
    """Span and value of what begins at `start`, maybe on several lines."""
    end = line_end(text, start)
    for _ in range(_MOST_LINES):
        value = _loaded(text[start:end])
        if value is not None:
            break
        if end == len(text):
            break
        end = line_end(text, end + 1)
    else:
        value = None
    if value is None:
        where = line_of(text, start)
        raise FrameworkError(f"{name}, line {where}: a value of more than {_MOST_LINES} lines")
    for comment in (found.start() for found in re.finditer("#", text[start:end])):
        if _loaded(text[start : start + comment]) == value:
            end = start + comment
            break
    return (start, start + len(text[start:end].rstrip())), value[0]


def _loaded(text: str) -> tuple[Any] | None:
    try:
        return (tomllib.loads(f"v = {text}")["v"],)
    except tomllib.TOMLDecodeError:
        return None


def _flat(
    path: tuple[str, ...], value: Any, line: int, span: tuple[int, int], whole: tuple[int, int]
) -> Iterator[Entry]:
    """One entry, or those of an inline table, which cannot be changed in place."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            for one in _flat((*path, key), inner, line, span, whole):
                yield Entry(one.key, one.value, line)
    else:
        yield Entry(".".join(path), value, line, span, whole)


def literal(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def changed(document: Document, key: str, value: Any, _near: str | None) -> str:
    """The text with one value replaced, added or deleted."""
    text = document.text
    if (found := in_place(document, key, value, lambda _: literal(value))) is not None:
        return found
    if key in document.entries:
        raise not_editable(document, key)
    section, _, last = key.rpartition(".")
    line = f"{last} = {literal(value)}\n"
    where = _end_of(text, section)
    if where is None:
        lead = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{lead}\n[{section}]\n{line}"
    lead = "" if where == 0 or text[where - 1] == "\n" else "\n"
    return put(text, (where, where), lead + line)


def _end_of(text: str, section: str) -> int | None:
    """The position after the last key of a section, or after its header; None without it."""
    position, inside, found = 0, not section, 0 if not section else None
    while position < len(text):
        end = line_end(text, position)
        header, key = _HEADER.match(text, position), _KEY.match(text, position)
        if header and header.end() == end:
            inside = header[1] == "[" and ".".join(_path(header[2])) == section
            found = min(end + 1, len(text)) if inside else found
        elif key:
            span, _ = _value("", text, key.end())
            end = line_end(text, span[1])
            found = min(end + 1, len(text)) if inside else found
        position = end + 1
    return found


TOML = Syntax("toml", parse, changed)
