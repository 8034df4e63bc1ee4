"""Finds the syntax of a text, parses it, and edits single keys of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwright.frameworks.documents.document import Document, Syntax
from shardwright.frameworks.documents.flags_text import FLAGS
from shardwright.frameworks.documents.json_text import JSON
from shardwright.frameworks.documents.python_text import PYTHON, Code
from shardwright.frameworks.documents.toml_text import TOML
from shardwright.frameworks.documents.yaml_text import YAML
from shardwright.frameworks.errors import FrameworkError

FORMS: Mapping[str, Syntax] = {form.name: form for form in (JSON, YAML, TOML, FLAGS, PYTHON)}
_HEADER = re.compile(r"^\[\[?[\w.\"' -]+\]\]?\s*(#.*)?$", re.MULTILINE)
_PYTHON = re.compile(r"^(def \w+\(|from [\w.]+ import |import \w)", re.MULTILINE)
_FLAG = re.compile(r"(?:^|\s|[\"'(])--[A-Za-z][\w.-]*(?![\w.-]*\s*:\s)", re.MULTILINE)
_YAML_KEY = re.compile(r"^[\w.\"'-]+[ \t]*:(\s|$)", re.MULTILINE)


def parse_document(name: str, text: str) -> Document:
    """The keys of a text in the syntax that it has; raises `FrameworkError`."""
    if "\0" in text:
        raise FrameworkError(f"{name}: it holds NUL characters, so it is no text")
    return FORMS[_form_of(text)].parse(name, text)


def _form_of(text: str) -> str:
    if text.startswith("#!") or (_FLAG.search(text) and not _YAML_KEY.search(text)):
        return "flags"
    if text.lstrip().startswith("{"):
        return "json"
    if _PYTHON.search(text):
        return "python"
    if _HEADER.search(text):
        return "toml"
    return "yaml" if _YAML_KEY.search(text) or not _FLAG.search(text) else "flags"


def edited(document: Document, changes: Mapping[str, Any], near: str | None) -> Document:
    """The document with some keys set, or deleted where the value is None.

    Comments, order and all other keys are kept. Each change is checked by parsing the new text.
    Raises `FrameworkError` where a key stands where it cannot be changed.
    """
    form = FORMS[document.form]
    # Deletions first: a word may become a section of the same name, or the other way.
    for key, value in sorted(changes.items(), key=lambda pair: pair[1] is not None):
        before = document.values()
        plain = value.value if isinstance(value, Code) else value
        if value is None and key not in document.entries:
            continue
        text = form.changed(document, key, value, near)
        document = form.parse(document.name, text)
        after = document.values()
        wanted = {**before, key: _as_read(document.form, plain)}
        kept = {k: v for k, v in wanted.items() if v is not None and not _inside(k, key)}
        if kept != {k: v for k, v in after.items() if not _inside(k, key)}:
            raise FrameworkError(
                f"{document.name}: {key} cannot be changed without changing other keys; write a"
                " new file"
            )
    return document


def _inside(key: str, section: str) -> bool:
    return key.startswith(f"{section}.") or section.startswith(f"{key}.")


def _as_read(form: str, value: Any) -> Any:
    """A value as it is read back: those of flags are text, tuples are lists."""
    several = isinstance(value, list | tuple)
    if form != "flags" or value is None or value is True:
        return list(value) if several else value
    words = [str(one) for one in (value if several else [value])]
    return words if len(words) > 1 else words[0]
