"""User errors: one line on stderr and exit status 2; bugs keep their traceback."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

from shardwright.ir.atomic_io import printable

MISTAKE = 2


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
        except click.ClickException as e:
            _fail(e.format_message(), e.exit_code)
        except click.Abort:
            _fail("interrupted", 130)
        except ValueError as e:
            if not _is_ours(e):
                raise
            _fail(str(e), MISTAKE)
        sys.exit(status if isinstance(status, int) else 0)


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


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"shardwright: {printable(' '.join(message.split()))}", err=True)
    sys.exit(status)
