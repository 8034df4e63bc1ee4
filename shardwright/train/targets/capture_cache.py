"""Caches captured graphs of `config.json` targets in the user's cache folder.

The code of such a model is that of transformers, so its graph depends only on the config, the
options of the capture, and what is installed; the key of an entry is a digest of all these. Entries
are JSON, so reading one runs no code. An entry that is damaged, of another key, or that another
user can write is ignored, and the model is captured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.ir.graph import ITEM_BYTES, Graph, VerifyError, verify
from shardwright.plan_io.checks import of_type, size
from shardwright.plan_io.graph_text import graph_from_json, graph_to_json
from shardwright.train.targets.target_text import ConfigTarget
from shardwright.train.targets.user_cache import UserCache, digest_of, installed

_FORMAT = 1
# What damaged or forged entries raise when they are decoded.
_DAMAGED = (
    *(ValueError, TypeError, KeyError, AttributeError, AssertionError),
    *(RecursionError, VerifyError),
)


@dataclass(frozen=True, slots=True)
class CachedCapture:
    """A captured graph, and what is known of its target besides.

    Attributes:
        graph: the graph.
        optimizer: its name in plans.
        precision: the sentence on the precision of the capture.
        weight_bytes: bytes of all parameters of the model as it is built.
    """

    graph: Graph
    optimizer: str
    precision: str
    weight_bytes: int


def capture_key(
    target: ConfigTarget,
    numerics: Mapping[str, str],
    optimizer: str | None,
    *,
    fast_halves: tuple[str, ...],
) -> str:
    """The key of a capture: a digest of the config, the options, and what is installed."""
    asked = {
        "format": _FORMAT,
        "file": target.file.name,
        "config": target.content,
        "given": target.given,
        "sizes": [target.batch, target.seq],
        "numerics": dict(numerics),
        "optimizer": optimizer,
        "fast_halves": fast_halves,
        "installed": installed(),
    }
    return digest_of(json.dumps(asked, sort_keys=True))


def kept_capture(key: str) -> CachedCapture | None:
    """The capture of this key; None if there is none or its entry cannot be trusted."""
    text = _entries().find(key)
    if text is None:
        return None
    try:
        return _decoded(text, key)
    except _DAMAGED:  # the model is captured again, and the entry replaced
        return None


def keep_capture(key: str, capture: CachedCapture) -> None:
    """Write the capture to the cache; no entry where that is not possible."""
    _entries().keep(key, _encoded(capture, key))


def _entries() -> UserCache:
    return UserCache.of_user("captures")


def _encoded(capture: CachedCapture, key: str) -> str:
    content = {
        "key": key,
        "optimizer": capture.optimizer,
        "precision": capture.precision,
        "weight_bytes": capture.weight_bytes,
        "graph": graph_to_json(capture.graph),
    }
    return json.dumps(content)


def _decoded(text: str, key: str) -> CachedCapture:
    """The capture of an entry; raises one of `_DAMAGED` for what `_encoded` did not write."""
    content = json.loads(text)
    if content["key"] != key:
        raise ValueError("the entry is of another capture")
    graph = graph_from_json(of_type(content["graph"], str))
    _check(graph)
    return CachedCapture(
        graph,
        of_type(content["optimizer"], str),
        of_type(content["precision"], str),
        size(content["weight_bytes"]),
    )


def _check(graph: Graph) -> None:
    """Raise one of `_DAMAGED` for a graph that no capture returns."""
    for value in graph.values:
        for text in (value.name, value.dtype, value.alias_of or ""):
            of_type(text, str)
        ITEM_BYTES[value.dtype]
        tuple(map(size, value.shape))
        of_type(value.requires_grad, bool)
    for op in graph.ops:
        for text in (op.name, op.target, op.rule, op.part_of, *op.outputs, *op.saves):
            of_type(text, str)
        tuple(map(size, (op.extra_saved, op.extra_rows, op.flop, op.source.line)))
    verify(graph)
