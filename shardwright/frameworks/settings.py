"""`Settings`: typed access to the keys of a config, which remembers what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from shardwright.frameworks.config import Key
from shardwright.frameworks.documents.document import Document, Entry
from shardwright.frameworks.errors import FrameworkError

T = TypeVar("T")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_LARGEST = 2**48  # of a whole number; token counts of a step have up to 2^30
_SHOWN = 60


def _same(key: str) -> str:
    return key


class Settings:
    """The keys of a document under the names of its framework.

    Args:
        document: the file.
        named: of a key as it is in the file, its name; "" for one that is no key of the framework.
        absent: values that mean that the key is not given.
    """

    def __init__(
        self,
        document: Document,
        named: Callable[[str], str] = _same,
        absent: tuple[str, ...] = (),
    ) -> None:
        self.document = document
        self.absent = absent
        self.differences: list[str] = []
        self.notes: list[str] = []
        self._sets: dict[str, tuple[str, ...]] = {}
        self._why: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        self._all = list(document.entries.values())
        for key, entry in document.entries.items():
            if name := named(key):
                self._entries[name] = entry

    def attach(self, document: Document, section: str) -> None:
        """Add the keys of another file, which the first names, below a section."""
        for key, entry in document.entries.items():
            other = Entry(f"{document.name}: {key}", entry.value, entry.line)
            self._entries[f"{section}.{key}"] = other
            self._all.append(other)

    def spelled(self, name: str) -> str | None:
        """The file's spelling of a key; None if it does not have the key."""
        entry = self._entries.get(name)
        return entry.key if entry is not None else None

    def __contains__(self, name: str) -> bool:
        value = self._entries[name].value if name in self._entries else None
        return value is not None and value not in self.absent

    def left_open(self) -> tuple[str, ...]:
        """The names of keys that were read whose values mean that they are not given."""
        return tuple(
            name
            for name, entry in self._entries.items()
            if entry.key in self._sets and entry.value in self.absent
        )

    def below(self, section: str) -> tuple[str, ...]:
        """The names of keys inside of a section."""
        return tuple(name for name in self._entries if name.startswith(f"{section}."))

    def raw(self, name: str, *sets: str) -> Any:
        """The value of a key, which counts as read; None where it is not given."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        self._sets[entry.key] = (*self._sets.get(entry.key, ()), *sets)
        return entry.value if name in self else None

    def _one(self, name: str, *sets: str) -> Any:
        """The value of a key that has one; on a command line other words may stand after it."""
        value = self.raw(name, *sets)
        several = isinstance(value, list) and self.document.form == "flags"
        return value[0] if several else value

    def integer(self, name: str, default: T, *sets: str, least: int = 1) -> int | T:
        """A whole number of at least `least`."""
        value = self._one(name, *sets)
        if value is None:
            return default
        if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= _LARGEST:
            self.refuse(name, f"a whole number of at least {least} is needed")
        return int(value)

    def number(self, name: str, default: T, *sets: str) -> float | T:
        """A number of at least 0."""
        value = self._one(name, *sets)
        if value is None:
            return default
        try:
            number = float(value) if not isinstance(value, bool | list | dict) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or not 0 <= number < float("inf"):
            self.refuse(name, "a number of at least 0 is needed")
        return number

    def switch(self, name: str, default: bool, *sets: str) -> bool:
        """True or false."""
        value = self._one(name, *sets)
        if value is None:
            return default
        text = str(value).lower()
        if self.document.form == "flags" and text not in _FALSE:
            return True
        if text not in (*_TRUE, *_FALSE):
            self.refuse(name, "true or false is needed")
        return text in _TRUE

    def word(self, name: str, default: T, words: Mapping[str, T], *sets: str) -> T:
        """The meaning of a word; letters may be small or large."""
        value = self._one(name, *sets)
        if value is None:
            return default
        meanings = {word.lower(): meaning for word, meaning in words.items()}
        if isinstance(value, list | dict) or str(value).lower() not in meanings:
            self.refuse(name, f"one of {', '.join(words)} is needed")
        return meanings[str(value).lower()]

    def text(self, name: str, default: T, *sets: str) -> str | T:
        """A word or path."""
        value = self._one(name, *sets)
        if value is None:
            return default
        if isinstance(value, list | dict):
            self.refuse(name, "one word is needed")
        return str(value)

    def words(self, name: str, *sets: str) -> tuple[str, ...]:
        """The words of a list; of a single value, that one."""
        value = self.raw(name, *sets)
        if value is None:
            return ()
        if isinstance(value, dict):
            self.refuse(name, "a list of words is needed")
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)

    def unaffecting(self, names: Iterable[str], why: str) -> None:
        """Say of keys that are not read why they change nothing in the strategy."""
        for name in names:
            if name in self._entries:
                self._why[self._entries[name].key] = why

    def differ(self, name: str, sentence: str) -> None:
        """Record that the strategy is not exactly what a key says."""
        self.differences.append(f"{self.where(name)}: {sentence}")

    def where(self, name: str) -> str:
        """The key as the file spells it, with its value and line."""
        entry = self._entries.get(name)
        if entry is None:
            return name
        shown = repr(entry.value)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        return f"line {entry.line}, {entry.key} = {shown}"

    def refuse(self, name: str, needed: str) -> NoReturn:
        """Raise the error of a value that cannot be."""
        entry = self._entries.get(name)
        hint = ""
        if entry is not None and isinstance(entry.value, str) and "$" in entry.value:
            hint = "; the script does not assign this variable, so write its value"
        raise FrameworkError(f"{self.document.name}, {self.where(name)}: {needed}{hint}")

    def require(self, holds: bool, name: str, needed: str) -> None:
        """Raise the error of `refuse` unless something holds."""
        if not holds:
            self.refuse(name, needed)

    def field_setter(self, field: str) -> str | None:
        """The key that was read for a field of the strategy, with its value and line."""
        for name, entry in self._entries.items():
            if field in self._sets.get(entry.key, ()):
                return self.where(name)
        return None

    def used(self) -> tuple[Key, ...]:
        """The keys that were read, by line."""
        read = (one for one in self._all if one.key in self._sets)
        return tuple(_by_line(Key(e.key, e.line, e.value, self._sets[e.key]) for e in read))

    def unused(self) -> tuple[Key, ...]:
        """The keys that were not read, by line; variables of scripts are no keys."""
        rest = (
            one
            for one in self._all
            if one.key not in self._sets and not one.key.startswith(("$", "#"))
        )
        return tuple(
            _by_line(Key(e.key, e.line, e.value, (), self._why.get(e.key, "")) for e in rest)
        )

    def document_notes(self) -> Iterable[str]:
        """Remarks on the file itself: repeated keys that were read, and branches."""
        for key, first, last in self.document.repeated:
            if key in self._sets:
                yield f"{key} stands on lines {first} and {last}; the last is read"
        inside = [
            self.document.entries[key]
            for key in self._sets
            if key in self.document.entries
            and self.document.entries[key].line in self.document.conditional
        ]
        if inside:
            lines = sorted({one.line for one in inside})
            named = ("line " if len(lines) == 1 else "lines ") + ", ".join(map(str, lines))
            yield f"branches of the script are not evaluated; read as taken: {named}"


def _by_line(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key.line, key.name))
