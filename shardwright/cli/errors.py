"""User errors: one line on stderr and exit status 2; bugs keep their traceback."""

from __future__ import annotations

import errno
import sys
from typing import Any, NoReturn

import click

from shardwright.ir.atomic_io import printable

MISTAKE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Parameters of commands, and options of other tools that may mean them.
_MEANT = {
    "plan": ("plan",),
    "target": ("config", "model", "model-config"),
    "devices": ("gpus", "num-gpus", "nproc-per-node", "world-size"),
    "machine": ("gpus", "num-gpus", "nproc-per-node", "world-size"),
    "batch": ("batch-size", "global-batch-size"),
    "seq": ("seq-len", "seq-length", "sequence-length"),
    "memory_limit": ("memory", "max-memory"),
    "mesh": ("dp", "tp", "cp", "ep"),
    "stages": ("pp",),
}


class UsageError(ValueError):
    """Invalid arguments of a command."""


class OneLineErrors(click.Group):
    """A click group whose commands print user errors in one line: `shardwright: …`."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        try:
            status = super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as e:
            click.echo(e.ctx.get_help() if e.ctx else "", err=True)
            sys.exit(MISTAKE)
        except click.MissingParameter as e:
            _fail(_missing(e), e.exit_code)
        except click.NoSuchOption as e:
            _fail(_meant(e), e.exit_code)
        except click.ClickException as e:
            _fail(e.format_message(), e.exit_code)
        except click.Abort:
            _fail("interrupted", 130)
        except ValueError as e:
            if not _is_ours(e):
                raise
            _fail(str(e), MISTAKE)
        except OSError as e:
            if e.errno not in _FULL:
                raise
            where = f" {e.filename}" if e.filename else ""
            _fail(f"cannot write{where}: {e.strerror}; make room, or write elsewhere", MISTAKE)
        sys.exit(status if isinstance(status, int) else 0)


def one_line(error: Exception) -> str:
    """The message of a user's error; a bug's class and message."""
    text = printable(" ".join(str(error).split()))
    ours = isinstance(error, ValueError) and _is_ours(error)
    return text if ours else f"{type(error).__name__}: {text}"


def _is_ours(error: ValueError) -> bool:
    """Whether the error class is one of this package for invalid input."""
    return type(error).__module__.partition(".")[0] == __name__.partition(".")[0]


def _missing(error: click.MissingParameter) -> str:
    """The message for a missing argument: its name, its meaning, and where to read on."""
    option = error.param
    said = f" {option.help}" if isinstance(option, click.Option) and option.help else ""
    command = error.ctx.info_name if error.ctx else ""
    message = error.format_message()
    if not message.endswith("."):
        message += "."
    return f"{message}{said} See shardwright {command} --help."


def _meant(error: click.NoSuchOption) -> str:
    """The message for an unknown option, with the parameter of the command that it may mean."""
    option = error.option_name.lstrip("-")
    known = {one.name: one for one in error.ctx.command.params} if error.ctx else {}
    found = next((known[n] for n, words in _MEANT.items() if option in words and n in known), None)
    if error.ctx is None or found is None:
        return error.format_message()
    said = f"No such option '{error.option_name}'."
    if isinstance(found, click.Option):
        return f"{said} Use {found.opts[0]}: {found.help}"
    usage = " ".join([error.ctx.command_path, *error.ctx.command.collect_usage_pieces(error.ctx)])
    return f"{said} Give {found.human_readable_name} as an argument: {usage}"


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"shardwright: {printable(' '.join(message.split()))}", err=True)
    sys.exit(status)
