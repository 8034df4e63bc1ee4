"""Finds the safetensors files of a path: one file, or a Hugging Face folder of one or several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.ir.atomic_io import read_up_to
from shardwright.runtime.weight_files.dcp_index import CheckpointError

SUFFIX = ".safetensors"
WEIGHTS = f"model{SUFFIX}"
INDEX = f"{WEIGHTS}.index.json"
_LARGEST_INDEX = 2**28  # bytes


def weight_files(path: Path) -> list[Path]:
    """The files that hold weights: itself, or those of a Hugging Face folder."""
    if not path.is_dir():
        return [path]
    if (path / WEIGHTS).exists() or not (path / INDEX).exists():
        return [path / WEIGHTS]
    return _parts(path / INDEX)


def _parts(index: Path) -> list[Path]:
    """The files that an index names, which all lie beside it."""
    try:
        names = set(json.loads(read_up_to(index, _LARGEST_INDEX))["weight_map"].values())
    except OSError as e:
        raise CheckpointError(f"cannot read {index}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{index} is no index of safetensors files: {e}") from e
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{index} names {name!r}, which is no plain file name")
    return [index.with_name(name) for name in sorted(names)]


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of reading a safetensors file as `CheckpointError`."""
    if Path(path).exists() and not Path(path).is_file():  # reading a pipe may never end
        raise CheckpointError(f"cannot read {path}: it is no regular file")
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    except Exception as e:  # safetensors' own error, which is no class of Python's
        raise CheckpointError(f"{path} is no safetensors file, or a part of one: {e}") from e
