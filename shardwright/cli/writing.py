"""Output files of commands: a path that cannot be written is a user error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import click

from shardwright.cli.errors import UsageError
from shardwright.ir.atomic_io import check_file, check_folder, write_atomically


def write_text(path: str, text: str) -> None:
    """Write the file atomically; raises `UsageError` where that is impossible."""
    try:
        write_atomically(path, text)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e


class _Output(click.Path, ABC):
    """The type of an output path, checked while options are parsed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(super().convert(value, param, ctx))
        if not path:
            self.fail("an empty path; name a file or folder to write", param, ctx)
        try:
            self.check(path)
        except OSError as e:
            why = e.strerror or str(e)
            self.fail(f"cannot write {path}: {why}; choose another path", param, ctx)
        return path

    @abstractmethod
    def check(self, path: str) -> None:
        """Raise `OSError` if nothing can be written to `path`."""


@final
class OutputFile(_Output):
    """The type of a file in an existing folder."""

    name = "file"

    def check(self, path: str) -> None:
        check_file(path)


@final
class OutputFolder(_Output):
    """The type of a folder, which is created with its parents."""

    name = "directory"

    def check(self, path: str) -> None:
        check_folder(path)


@final
class OutputFileOrFolder(_Output):
    """The type of a path that is a file if its name ends in one of `suffixes`, else a folder.

    With `make_folder` the folder of the file is created.
    """

    name = "path"

    def __init__(self, *suffixes: str, make_folder: bool = False) -> None:
        super().__init__()
        self.suffixes = suffixes
        self.make_folder = make_folder

    def check(self, path: str) -> None:
        if path.endswith(self.suffixes):
            check_file(path, make_folder=self.make_folder)
        else:
            check_folder(path)
