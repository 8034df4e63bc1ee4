"""YAML files with the positions of their values; PyYAML reads nodes and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from shardwright.frameworks.documents.document import (
    DEEPEST,
    Document,
    Entry,
    Syntax,
    in_place,
    line_end,
    not_editable,
    put,
)
from shardwright.frameworks.errors import FrameworkError

MOST_BYTES = 2**19  # PyYAML reads about 100 KiB a second


def parse(name: str, text: str) -> Document:
    """The keys of a YAML mapping; tags of Python objects are refused, nothing is executed."""
    if len(text) > MOST_BYTES:
        raise FrameworkError(f"{name}: YAML of more than {MOST_BYTES} characters is not read")
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise FrameworkError(f"{name}: it is no YAML mapping of keys to values")
            entries = _entries(name, text, loader, node, ())
            return Document.of(name, "yaml", text, entries)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise FrameworkError(f"{name}{where}: it is no YAML: {e.problem or e.context}") from e
    except yaml.YAMLError as e:
        raise FrameworkError(f"{name}: it is no YAML: {str(e).splitlines()[0]}") from e
    except RecursionError as e:
        raise FrameworkError(f"{name}: it is no YAML: it nests too deeply") from e


def _entries(
    name: str, text: str, loader: yaml.SafeLoader, node: yaml.MappingNode, path: tuple[str, ...]
) -> Iterator[Entry]:
    if len(path) > DEEPEST:
        raise FrameworkError(f"{name}: sections nest more than {DEEPEST} deep")
    _require_plain_merges(name, node)
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = _constructed(name, loader, key_node)
        if not isinstance(key, str | int | float | bool):
            line = key_node.start_mark.line + 1
            raise FrameworkError(f"{name}, line {line}: a key is no plain word")
        inner = (*path, str(key))
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _entries(name, text, loader, value_node, inner)
            continue
        value = _constructed(name, loader, value_node)
        start, end = value_node.start_mark.index, value_node.end_mark.index
        behind = max(start, _end(text, start, end))
        if "\n" in text[key_node.end_mark.index : start]:  # a list on lines of its own
            start = text.index(":", key_node.end_mark.index) + 1
        whole = None
        if not node.flow_style:
            first = text.rfind("\n", 0, key_node.start_mark.index) + 1
            whole = (
                first,
                min(line_end(text, max(behind, key_node.end_mark.index)) + 1, len(text)),
            )
        line = key_node.start_mark.line + 1
        yield Entry(".".join(inner), value, line, (start, behind), whole)


def _require_plain_merges(name: str, node: yaml.MappingNode) -> None:
    """Refuse merge keys of merge keys, whose expansion has no bound."""
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            inner = value.value if isinstance(value, yaml.MappingNode) else [(key, value)]
            if any(one.tag == key.tag for one, _ in inner):
                line = key.start_mark.line + 1
                raise FrameworkError(
                    f"{name}, line {line}: `<<` merges one mapping that has no `<<` itself;"
                    " write the keys out"
                )


def _end(text: str, start: int, end: int) -> int:
    """The end of a value without the blank lines that PyYAML counts to a block."""
    while end > start and text[end - 1] in " \t\r\n":
        end -= 1
    return end


def _constructed(name: str, loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """The value of a node."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.CollectionNode):
        _require_shallow(name, node, line, [0])
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, TypeError, OverflowError) as e:  # a date that is none, thousands of digits
        raise FrameworkError(f"{name}, line {line}: a value cannot be read") from e


def _require_shallow(
    name: str, node: yaml.Node, line: int, seen: list[int], depth: int = 0
) -> None:
    """Refuse aliases that expand to very many values, or to themselves."""
    seen[0] += 1
    if seen[0] > 10_000 or depth > DEEPEST:
        raise FrameworkError(f"{name}, line {line}: a value has too many parts")
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for one in pair:
                _require_shallow(name, one, line, seen, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _require_shallow(name, one, line, seen, depth + 1)


def literal(value: Any) -> str:
    """A value in YAML, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def block(content: Any, indent: str) -> str:
    """A mapping in YAML, on lines that begin with `indent`."""
    lines = yaml.safe_dump(content, sort_keys=False, width=10**9).splitlines()
    return "".join(f"{indent}{line}\n" for line in lines)


def changed(document: Document, key: str, value: Any, _near: str | None) -> str:
    """The text with one value replaced, added or deleted."""
    text = document.text

    def written(entry: Entry) -> str:
        assert entry.span is not None
        return (" " if text[entry.span[0] - 1] == ":" else "") + literal(value)

    if (found := in_place(document, key, value, written)) is not None:
        return found
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise not_editable(document, key)
    node, missing = root, key.split(".")
    while len(missing) > 1:
        inner = next((v for k, v in node.value if k.value == missing[0]), None)
        if not isinstance(inner, yaml.MappingNode) or not inner.value:
            break
        node, missing = inner, missing[1:]
    return _inserted(document, node, missing, value)


def _inserted(document: Document, node: yaml.MappingNode, path: list[str], value: Any) -> str:
    """The text with a key below the mapping `node`, whose sections on the path are new or empty."""
    text = document.text
    content: Any = value
    for section in reversed(path[1:]):
        content = {section: content}
    if node.flow_style:
        where = _end(text, 0, node.end_mark.index - 1)
        return put(text, (where, where), f", {path[0]}: {literal(content)}")
    indent = " " * node.start_mark.column
    empty = next(((k, v) for k, v in node.value if k.value == path[0]), None)
    if empty is not None:  # a section without keys: its null, or its braces, are replaced
        start = text.index(":", empty[0].end_mark.index) + 1
        end = max(start, _end(text, start, empty[1].end_mark.index))
        return put(text, (start, end), "\n" + block(content, indent + "  ").removesuffix("\n"))
    where = line_end(text, _last(text, node))
    return put(text, (where, where), "\n" + block({path[0]: content}, indent).removesuffix("\n"))


def _last(text: str, node: yaml.MappingNode) -> int:
    """The last position of the text of a block mapping."""
    key, value = node.value[-1]
    start = min(key.end_mark.index, value.start_mark.index)
    return max(int(key.end_mark.index), _end(text, start, value.end_mark.index))


YAML = Syntax("yaml", parse, changed)
