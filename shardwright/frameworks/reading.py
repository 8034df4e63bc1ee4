"""Reads training configs of other frameworks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Semantics, TrainingConfig
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.documents.forms import parse_document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.models import known_model
from shardwright.frameworks.readers.understood import Given, Understood
from shardwright.frameworks.registry import Framework, framework_of
from shardwright.frameworks.settings import Settings
from shardwright.ir.atomic_io import FileSizeError, read_text_up_to
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy

MOST_BYTES = 2**22  # a dump of every layer of a model has about 1 MiB
_PARENTS = 4  # folders above a config in which a file that it names may be


def read_file(
    path: str | Path, *, framework: str | None = None, devices: int | None = None
) -> TrainingConfig:
    """The config in a file; nothing of it is executed.

    Args:
        path: the file.
        framework: its framework; None: by its content.
        devices: ranks of the job, which most files leave open.

    Raises:
        FrameworkError: for a file that cannot be read, with key and line.
    """
    document = load_document(path)
    return read_document(document, framework, devices, _companion(Path(path)))


def read_text(
    text: str,
    *,
    name: str = "config",
    framework: str | None = None,
    devices: int | None = None,
) -> TrainingConfig:
    """The config in a text; `name` is for messages. Otherwise as `read_file`."""
    return read_document(parse_document(name, text), framework, devices, no_companion)


def load_document(path: str | Path) -> Document:
    """The keys of a file; raises `FrameworkError`."""
    name = Path(path).name
    try:
        text = read_text_up_to(path, MOST_BYTES)
    except FileSizeError as e:
        raise FrameworkError(f"{name}: {e}") from e
    except OSError as e:
        raise FrameworkError(f"cannot read {path}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise FrameworkError(f"{name}: it is no UTF-8 text") from e
    return parse_document(name, text)


def read_document(
    document: Document,
    framework: str | None,
    devices: int | None,
    companion: Callable[[str], Document],
) -> TrainingConfig:
    """The config of a parsed file."""
    found = framework_of(document, framework)
    settings = found.settings(document)
    understood = found.read(settings, Given(devices, companion))
    return _config(found, settings, understood)


def _config(found: Framework, settings: Settings, understood: Understood) -> TrainingConfig:
    try:
        strategy = Strategy(**understood.fields)
    except StrategyError as e:
        raise FrameworkError(f"{settings.document.name}{_origin(settings, str(e))}: {e}") from e
    return TrainingConfig(
        framework=found.name,
        dialect=understood.dialect,
        source=settings.document.name,
        strategy=canonical(strategy),
        batch=understood.batch,
        model=known_model(understood.model),
        semantics=Semantics(
            gradient_sync="every" if strategy.syncs_every else "last",
            clip=understood.clip,
            loss_mean=understood.loss_mean,
            global_batch=understood.batch.samples,
        ),
        used=settings.used(),
        unused=settings.unused(),
        differences=tuple(settings.differences),
        notes=(*settings.notes, *settings.document_notes()),
    )


def _origin(settings: Settings, message: str) -> str:
    """The key of the field that an error of a strategy begins with."""
    field = re.match(r"(\w+)(?:=| )", message)
    key = settings.field_setter(field[1]) if field else None
    return f", {key}" if key else ""


def _companion(config: Path) -> Callable[[str], Document]:
    """Reads a file that a config names: beside it, or below one of the folders above."""

    def load(named: str) -> Document:
        relative = PurePosixPath(named)
        if relative.is_absolute() or ".." in relative.parts:
            raise FrameworkError(
                f"{config.name}: it names {named}, which is not below its folder; name a file that"
                " is"
            )
        folders = list(config.absolute().parents)[: _PARENTS + 1]
        for folder in folders:
            if (folder / relative).is_file():
                return load_document(folder / relative)
        raise FrameworkError(f"{config.name}: it names {named}, which is not beside it")

    return load


def no_companion(named: str) -> Document:
    """Refuse to read another file; raises `FrameworkError`."""
    raise FrameworkError(f"it names {named}, and only files can name others")
