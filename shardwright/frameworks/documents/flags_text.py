"""Shell scripts and command lines, read for their `--flags` alone; nothing is executed.

Simple assignments (`TP=8`, `TP=${TP:-8}`, `WORLD=$((8 * NODES))`) are substituted. Branches are not
evaluated: flags inside of them are read, and their lines are kept as conditional.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.frameworks.documents.document import (
    Document,
    Entry,
    Syntax,
    line_end,
    line_of,
    not_editable,
    put,
    without,
)
from shardwright.frameworks.errors import FrameworkError

MOST_BYTES = 2**19
_TOKEN = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|(?:\$\(\([^\n]*?\)\)|[^\s\"'()\\;&|])+|[();&|\\\"'\n]")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*", re.MULTILINE)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
_SBATCH = re.compile(r"^#SBATCH\s+--([\w-]+)[= ](\S+)", re.MULTILINE)
_OPENS, _CLOSES = ("if", "case", "while", "until"), ("fi", "esac", "done")


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    start: int
    end: int
    inner: int  # where the text begins, after a quote

    @property
    def ends(self) -> bool:
        """Whether no value of a flag goes beyond it."""
        return self.text in ("(", ")", ";", "&", "|") or self.text.startswith("--")


def parse(name: str, text: str) -> Document:
    """The flags of a script or a command line."""
    if len(text) > MOST_BYTES:
        raise FrameworkError(f"{name}: a script of more than {MOST_BYTES} characters is not read")
    blank = _COMMENT.sub(lambda found: " " * len(found[0]), text)
    tokens = list(_tokens(blank))
    return Document.of(
        name, "flags", text, [*_sbatch(text), *_entries(text, tokens)], _conditional(blank)
    )


def _sbatch(text: str) -> Iterator[Entry]:
    for found in _SBATCH.finditer(text):
        yield Entry(f"#SBATCH.{found[1]}", found[2], line_of(text, found.start()))


def _conditional(text: str) -> Iterator[int]:
    """The lines inside of branches and loops."""
    depth = 0
    for number, line in enumerate(text.split("\n"), 1):
        words = re.findall(r"[\w-]+|\S", line)
        first = words[0] if words else ""
        depth += first in _OPENS or first == "for"
        if depth:
            yield number
        closes = first in _CLOSES or (first in _OPENS and bool(words) and words[-1] in _CLOSES)
        depth -= closes and depth > 0


def _tokens(text: str) -> Iterator[_Token]:
    """The words of a script; a quoted one that holds flags is split into its words."""
    for found in _TOKEN.finditer(text):
        word, start, end = found[0], found.start(), found.end()
        if word in ("\\", '"', "'"):
            continue
        if word[0] in "\"'" and len(word) > 1:
            if re.search(r"(?:^|\s)--[A-Za-z]", word[1:-1]):
                for inner in re.finditer(r"\S+", word[1:-1]):
                    at = start + 1 + inner.start()
                    yield _Token(inner[0].strip("\"'"), at, at + len(inner[0]), at)
            else:
                yield _Token(word[1:-1], start, end, start + 1)
        else:
            yield _Token(word, start, end, start)


def _entries(text: str, tokens: list[_Token]) -> Iterator[Entry]:
    """The flags with their values; assigned variables are entries named `$NAME`."""
    known: dict[str, str] = {}
    for place, token in enumerate(tokens):
        flag, assigned = _FLAG.fullmatch(token.text), _ASSIGNED.fullmatch(token.text)
        line = line_of(text, token.start) if flag or assigned else 0
        if flag and flag[2] is not None:
            value, end = _joined(flag[2], tokens, place)
            span = (token.end - len(flag[2]), end)
            yield Entry(flag[1], _resolved(value, known), line, span, (token.start, end))
        elif flag:
            yield _separate(flag[1], tokens, place, line, known)
        elif assigned:
            value, _ = _joined(assigned[2], tokens, place)
            known[assigned[1]] = _resolved(value, known)
            yield Entry(f"${assigned[1]}", known[assigned[1]], line)


def _joined(value: str, tokens: list[_Token], place: int) -> tuple[str, int]:
    """The value after `=`, in quotes or not, and where it ends."""
    token = tokens[place]
    behind = tokens[place + 1] if place + 1 < len(tokens) else token
    if not value and behind.start == token.end and behind.inner == behind.start + 1:
        return behind.text, behind.end
    return value, token.end


def _separate(
    name: str, tokens: list[_Token], place: int, line: int, known: dict[str, str]
) -> Entry:
    """A flag whose values, if it has any, are the words after it."""
    values = []
    for token in tokens[place + 1 :]:
        if token.ends or token.text == "\n" or _array_end(token.text):
            break
        if re.match(r"-[A-Za-z]", token.text) or token.text.endswith((".py", ".sh")):
            break
        values.append(token)
    first = tokens[place]
    if not values:
        return Entry(name, True, line, None, (first.start, first.end))
    span = (values[0].start, values[-1].end)
    words = [_resolved(token.text, known) for token in values]
    value = words[0] if len(words) == 1 else words
    return Entry(name, value, line, span, (first.start, span[1]))


def _array_end(word: str) -> bool:
    """Whether a word is another group of arguments, as `${DATA_ARGS[@]}`."""
    return "[@]" in word or re.fullmatch(r"\$\{?\w*(ARGS|OPTIONS|FLAGS)\w*\}?", word) is not None


def _resolved(text: str, known: dict[str, str]) -> str:
    """The text with variables and sums of whole numbers replaced, as far as they are known."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[2], found[3]
        return known.get(name, found[0] if default is None else default)

    product = re.fullmatch(r"\$\(\((.*)\)\)", text)
    if product:
        inner = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: known.get(m[1], m[0]), product[1])
        number = _calculated(inner)
        return text if number is None else str(number)
    return _VARIABLE.sub(value, text)[:10_000]


def _calculated(text: str) -> int | None:
    """The value of a sum or product of whole numbers; None for anything else.

    >>> _calculated("8 * (2 + 2)")
    32
    """
    if len(text) > 200:
        return None
    try:
        return _number(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if abs(value) < 2**40:
            return value
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _number(left) * _number(right)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return _number(left) // _number(right)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _number(left) + _number(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _number(left) - _number(right)
    raise ValueError


def words(value: Any) -> str:
    """The value of a flag as it is written."""
    if isinstance(value, list):
        return " ".join(map(words, value))
    text = str(value)
    return text if re.fullmatch(r"[\w.,:/+-]+", text) else f'"{text}"'


def changed(document: Document, key: str, value: Any, near: str | None) -> str:
    """The text with one flag's value replaced, or the flag added or deleted."""
    text, entry = document.text, document.entries.get(key)
    if value is None:
        if entry is None or entry.whole is None:
            raise not_editable(document, key)
        start, end = entry.whole
        # A line of its own goes with its backslash.
        first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
        last = len(text) if last < 0 else last
        if not text[first:start].strip() and text[end:last].strip() in ("", "\\"):
            return without(text, (first, min(last + 1, len(text))))
        return without(text, (start, end + (text[end : end + 1] == " ")))
    if entry is not None:
        if value is True:
            return text
        if entry.span is None:
            raise not_editable(document, key)
        return put(text, entry.span, words(value))
    anchor = document.entries.get(near or "")
    if anchor is None or anchor.whole is None:
        raise not_editable(document, key)
    start, end = anchor.whole
    added = f"--{key}" + ("" if value is True else f" {words(value)}")
    first = text.rfind("\n", 0, start) + 1
    behind = text[end : line_end(text, end)]
    if not text[first:start].strip() and behind.strip() in ("", "\\"):  # a line of its own
        where = line_end(text, end)
        return put(text, (where, where), f"\n{text[first:start]}{added}{behind.rstrip()}")
    return put(text, (end, end), f" {added}")


FLAGS = Syntax("flags", parse, changed)
