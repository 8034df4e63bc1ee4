"""Caches captured graphs of `config.json` targets in the user's cache folder.

The code of such a model is that of transformers, so its graph depends only on the config, the
options of the capture, and what is installed; the key of an entry is a digest of all these. Entries
are JSON, so reading one runs no code. An entry that is damaged, of another key, or that another
user can write is ignored, and the model is captured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from platform import node

from shardwright.ir.atomic_io import read_text_up_to, write_atomically
from shardwright.ir.graph import ITEM_BYTES, Graph, VerifyError, verify
from shardwright.plan_io.checks import of_type, size
from shardwright.plan_io.graph_text import graph_from_json, graph_to_json
from shardwright.train.targets.target_text import ConfigTarget

_FORMAT = 1
_LARGEST = 2**28  # bytes of an entry; a model of 128 layers has some MiB
_MOST_ENTRIES = 64
# Variables that may select another implementation of an operator, or another device.
_VARIABLES = ("CUDA", "HF_", "PYTORCH", "TORCH", "TRANSFORMERS", "USE_", "HIP", "ROCR", "XPU")
# What damaged or forged entries raise when they are decoded.
_DAMAGED = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError),
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
    faster_in_bf16: bool,
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
        "faster_in_bf16": faster_in_bf16,
        "installed": _installed(),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CaptureCache:
    """The entries in `folder`, by key."""

    folder: Path

    @classmethod
    def of_user(cls) -> CaptureCache:
        """The cache in the user's cache folder."""
        home = os.environ.get("XDG_CACHE_HOME")
        root = Path(home) if home else Path.home() / ".cache"
        return cls(root / "shardwright" / "captures")

    def find(self, key: str) -> CachedCapture | None:
        """The capture of this key; None if there is none or its entry cannot be trusted."""
        try:
            file = self._file(key)
            _require_private(self.folder)
            _require_private(file)
            found = _decoded(read_text_up_to(file, _LARGEST), key)
        except _DAMAGED:  # the model is captured again, and the entry replaced
            return None
        with suppress(OSError):  # the entries that were not used for longest are removed first
            os.utime(file)
        return found

    def keep(self, key: str, capture: CachedCapture) -> None:
        """Write the capture, and remove the oldest entries; no entry where that is not possible."""
        text = _encoded(capture, key)
        with suppress(OSError):  # e.g. a read-only disk: the next command captures again
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _require_private(self.folder)
            write_atomically(self._file(key), text)
            self._file(key).chmod(0o600)
            self._remove_oldest()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _remove_oldest(self) -> None:
        entries = sorted(self.folder.glob("*.json"), key=lambda one: -one.stat().st_mtime)
        for entry in entries[_MOST_ENTRIES:]:
            entry.unlink(missing_ok=True)


def _require_private(path: Path) -> None:
    """Raise `OSError` unless this user owns `path` and nobody else can write it."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(f"{path} is a link")
    if os.name == "posix" and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise OSError(f"others can write {path}")


def _encoded(capture: CachedCapture, key: str) -> str:
    content = {
        "key": key,
        "optimizer": capture.optimizer,
        "precision": capture.precision,
        "weight_bytes": capture.weight_bytes,
        "graph": graph_to_json(capture.graph),
    }
    text = json.dumps(content)
    return f"{_digest(text)}\n{text}"


def _decoded(text: str, key: str) -> CachedCapture:
    """The capture of an entry; raises one of `_DAMAGED` for what `_encoded` did not write."""
    digest, _, text = text.partition("\n")
    if digest != _digest(text):
        raise ValueError("the entry is damaged")
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _installed() -> str:
    """A digest of the host, Python, installed packages, and the code that captures."""
    found = hashlib.sha256()
    for part in _parts_of_installation():
        found.update(part.encode())
        found.update(b"\0")
    return found.hexdigest()


def _parts_of_installation() -> Iterator[str]:
    yield from (node(), sys.platform, sys.version, sys.prefix)
    yield from (f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES))
    for folder in dict.fromkeys(sys.path):  # names of these files have the versions
        with suppress(OSError):
            names = os.listdir(folder or ".")
            yield from sorted(one for one in names if one.endswith((".dist-info", ".egg-info")))
    for package in ("shardwright", "transformers"):  # both may be installed from sources
        yield from _files_of(package)


def _files_of(package: str) -> Iterator[str]:
    """Path, size and time of every Python file of a package, which is not imported."""
    spec = find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(name for name in names if name.endswith(".py")):
                file = os.stat(os.path.join(folder, name))
                yield f"{folder}/{name} {file.st_size} {file.st_mtime_ns}"
