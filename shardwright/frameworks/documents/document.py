"""`Document`: a config file as keys with values, each with its line and its place in the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.frameworks.errors import FrameworkError

MOST_ENTRIES = 20_000  # keys of one file; a dump of every layer of a model has a few thousand
DEEPEST = 64  # nested sections


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a file.

    Attributes:
        key: the path of the key, joined with dots; of flags, the name without dashes.
        value: the value: a scalar, a list, or an empty section as `{}`.
        line: where the key stands, from 1.
        span: where the value stands in the text; None: it cannot be replaced.
        whole: what is deleted where the key goes; None: it cannot be deleted.
    """

    key: str
    value: Any
    line: int
    span: tuple[int, int] | None = None
    whole: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A file that was parsed.

    Attributes:
        name: of the file, for messages.
        form: "json", "yaml", "toml", "flags" or "python".
        text: the whole text.
        entries: by key; of a key that is given again, the last.
        repeated: keys that are given more than once, with the lines.
        conditional: lines inside of a branch that is not evaluated.
    """

    name: str
    form: str
    text: str
    entries: Mapping[str, Entry]
    repeated: tuple[tuple[str, int, int], ...] = ()
    conditional: frozenset[int] = field(default=frozenset())

    @classmethod
    def of(
        cls,
        name: str,
        form: str,
        text: str,
        entries: Iterable[Entry],
        conditional: Iterable[int] = (),
    ) -> Document:
        """The document of these entries; raises `FrameworkError` where there are too many."""
        found: dict[str, Entry] = {}
        repeated = []
        for number, entry in enumerate(entries):
            if number == MOST_ENTRIES:
                raise FrameworkError(f"{name}: it has more than {MOST_ENTRIES} keys")
            if entry.key in found:
                repeated.append((entry.key, found[entry.key].line, entry.line))
            found[entry.key] = entry
        return cls(name, form, text, found, tuple(repeated), frozenset(conditional))

    def values(self) -> dict[str, Any]:
        """The values by key, those that are null left out."""
        return {key: one.value for key, one in self.entries.items() if one.value is not None}

    def section(self, path: str) -> bool:
        """Whether a section of this path is in the file."""
        return any(key == path or key.startswith(f"{path}.") for key in self.entries)


@dataclass(frozen=True, slots=True)
class Syntax:
    """One syntax of files.

    Attributes:
        name: as in `Document.form`.
        parse: of a file's name and text; raises `FrameworkError`.
        changed: the text with one key set to a value, or deleted where the value is None. `near`
            is a key in whose neighbourhood a new one goes, where the syntax has no sections.
    """

    name: str
    parse: Callable[[str, str], Document]
    changed: Callable[[Document, str, Any, str | None], str]


def line_of(text: str, position: int) -> int:
    """The line of a position in the text, from 1."""
    return text.count("\n", 0, position) + 1


def line_end(text: str, position: int) -> int:
    """The position of the end of the line that holds `position`."""
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def without(text: str, span: tuple[int, int]) -> str:
    """The text without a span."""
    return text[: span[0]] + text[span[1] :]


def put(text: str, span: tuple[int, int], new: str) -> str:
    """The text with a span replaced."""
    return text[: span[0]] + new + text[span[1] :]


def in_place(
    document: Document, key: str, value: Any, written: Callable[[Entry], str]
) -> str | None:
    """The text with the entry of `key` deleted or replaced; None where the key has to be added.

    A value of None deletes the entry; `written` is the new value as text. Raises `FrameworkError`
    for an entry that cannot be deleted.
    """
    entry = document.entries.get(key)
    if value is None:
        if entry is None or entry.whole is None:
            raise not_editable(document, key)
        return without(document.text, entry.whole)
    if entry is None or entry.span is None:
        return None
    return put(document.text, entry.span, written(entry))


def not_editable(document: Document, key: str) -> FrameworkError:
    """The error of a key that stands where it cannot be changed in place."""
    entry = document.entries.get(key)
    where = f", line {entry.line}" if entry else ""
    return FrameworkError(
        f"{document.name}{where}: {key} cannot be changed in place; write a new file"
    )
