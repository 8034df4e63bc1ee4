"""`shardwright audit`: reads the training config of another framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from shardwright.cli import options, planning
from shardwright.cli.console import print_json
from shardwright.cli.errors import UsageError
from shardwright.cli.groups import MachineOptions
from shardwright.cli.writing import OutputFile, write_text
from shardwright.frameworks.config import ModelHints, TrainingConfig
from shardwright.frameworks.models import FLAVORS, flavor, model_of_config
from shardwright.frameworks.reading import load_document, read_file
from shardwright.frameworks.registry import FRAMEWORKS
from shardwright.frameworks.writing import WRITERS, Written, convert_config, edit_config
from shardwright.ir.strategy.strategy import Strategy
from shardwright.ir.strategy.text import read
from shardwright.report.audit import audit_json, audit_text


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The file to write, its framework, and changes of the strategy."""

    changes: str | None
    framework: str | None
    output: str | None


@click.command("audit")
@click.argument("config", type=click.Path(dir_okay=False))
@click.option(
    "--framework", type=click.Choice(tuple(FRAMEWORKS)), help="Its framework, if not recognised."
)
@click.option("--devices", type=click.IntRange(1, 2**20), help="Ranks of the job.")
@click.option("--machine", help="Machine that the job runs on, instead of --devices.")
@click.option("--model", help="A config.json, or a flavor such as 'llama3 8B'.")
@click.option("--with", "changes", help="Changes of the strategy, as 'tp=4 ac=full'.")
@click.option("--to", "target", type=click.Choice(tuple(WRITERS)), help="Format to write.")
@click.option("-o", "--output", type=OutputFile(), help="Config file to write.")
@options.as_json
def command(
    config: str,
    framework: str | None,
    devices: int | None,
    machine: str | None,
    model: str | None,
    as_json: bool,
    **wanted: str | None,
) -> None:
    """Read CONFIG, which trains with another framework, and say what it does.

    Read are configs of torchtitan, Megatron-LM, Megatron-Bridge, accelerate,
    DeepSpeed, transformers' Trainer, axolotl, LLaMA-Factory and torchtune.
    Nothing in them is executed. With --with, -o writes CONFIG with the changed
    keys alone; with --to, a new config of another framework.
    """
    file = _Wanted(wanted["changes"], wanted["target"], wanted["output"])
    ranks = _devices(devices, machine)
    found = read_file(config, framework=framework, devices=ranks)
    if model is not None:
        found = replace(found, model=_model(model))
    written = _written(config, found, file)
    if as_json:
        print_json({**audit_json(found), "written": _content(written, file)})
        return
    click.echo(audit_text(found))
    if written is not None:
        click.echo(f"\nwrote {file.output}: {written.strategy}")
        for reason in written.reasons:
            click.echo(f"  not as asked: {reason}")


def _devices(devices: int | None, machine: str | None) -> int | None:
    if devices is not None and machine is not None:
        raise UsageError("--devices and --machine both say how many ranks there are; give one")
    if machine is None:
        return devices
    return planning.machine_of(MachineOptions(machine, {})).devices


def _model(text: str) -> ModelHints:
    """The model of a config.json, or of a flavor."""
    if Path(text).suffix == ".json" or Path(text).is_file():
        return model_of_config(load_document(text))
    known = flavor(None, text)
    if known.layers is None:
        raise UsageError(
            f"the model {text!r} is no config.json and none of {', '.join(map(str, FLAVORS))}"
        )
    return known


def _written(config: str, found: TrainingConfig, file: _Wanted) -> Written | None:
    """The settings written to the file; None if no file was asked for."""
    if file.output is None:
        if file.changes is not None or file.framework is not None:
            raise UsageError("--with and --to change what -o writes; name the file with -o")
        return None
    if file.changes is None and file.framework is None:
        raise UsageError("-o writes a changed config; say what changes with --with, or --to")
    strategy = _changed(found.strategy, file.changes or "")
    if file.framework is None:
        written = edit_config(load_document(config), found, strategy)
    else:
        written = convert_config(found, file.framework, strategy)
    write_text(file.output, written.text)
    return written


def _changed(strategy: Strategy, changes: str) -> Strategy:
    return strategy.but(**read(changes))


def _content(written: Written | None, file: _Wanted) -> dict[str, object] | None:
    if written is None:
        return None
    return {
        "file": file.output,
        "strategy": str(written.strategy),
        "reasons": list(written.reasons),
        "text": written.text,
    }
