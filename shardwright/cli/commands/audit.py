"""`shardwright audit`: reads the training config of another framework, prices and improves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import click

from shardwright.cli import auditing, options
from shardwright.cli.console import print_json, say
from shardwright.cli.errors import UsageError
from shardwright.cli.groups import MachineOptions
from shardwright.cli.planning import named_machines
from shardwright.cli.writing import OutputFile, write_text
from shardwright.frameworks.config import TrainingConfig
from shardwright.frameworks.reading import load_document, read_file
from shardwright.frameworks.registry import FRAMEWORKS
from shardwright.frameworks.writing import WRITERS, Written, convert_config, edit_config
from shardwright.ir.strategy.text import read
from shardwright.machine.model import Machine
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.report.audit.config_text import audit_json, audit_text
from shardwright.report.audit.price_text import (
    ConfigPrices,
    Improved,
    improved_json,
    improved_text,
    prices_json,
    prices_text,
)


@dataclass(frozen=True, slots=True)
class _File:
    """The file to write, its framework, and changes of the strategy."""

    output: str | None
    framework: str | None
    changes: str | None

    @property
    def improves(self) -> bool:
        """Whether what to write is found by prices."""
        return self.output is not None and self.framework is None and self.changes is None


@click.command("audit")
@click.argument("config", type=click.Path(dir_okay=False))
@click.option(
    "--framework", type=click.Choice(tuple(FRAMEWORKS)), help="Its framework, if not recognised."
)
@click.option("--devices", type=click.IntRange(1, 2**20), help="Ranks of the job.")
@click.option("--machine", help="Machine that the job runs on, instead of --devices: prices it.")
@click.option("--model", help="A config.json, or a flavor such as 'llama3 8B'.")
@click.option("--batch", type=click.IntRange(1), help="Sequences of a step, if not in CONFIG.")
@click.option("--seq", type=click.IntRange(2), help="Tokens of a sequence, if not in CONFIG.")
@options.memory_limit
@options.optimizer
@click.option(
    "--search",
    "searched",
    type=click.Choice(auditing.SEARCHES),
    default=auditing.SEARCHES[0],
    show_default=True,
    help="Search plans that are not uniform: like the best uniform one, all, or none.",
)
@click.option("--with", "changes", help="Changes of the strategy, as 'tp=4 ac=full'.")
@click.option("--to", "target", type=click.Choice(tuple(WRITERS)), help="Format to write.")
@click.option("-o", "--output", type=OutputFile(), help="Config file to write.")
@click.option("--all", "whole", is_flag=True, help="List all keys and all single changes.")
@options.no_cache
@options.as_json
@paused_to_the_end()
def command(config: str, whole: bool, as_json: bool, **given: Any) -> None:
    """Read CONFIG, which trains with another framework; say what it does and costs.

    Read are configs of torchtitan, Megatron-LM, Megatron-Bridge, accelerate,
    DeepSpeed, transformers' Trainer, axolotl, LLaMA-Factory and torchtune.
    Nothing in them is executed. With --machine the config is priced, with what
    single changes buy and the best strategy, and -o writes CONFIG with the best
    that its format can express: changed keys alone. With --with, -o writes the
    given changes; with --to, a new config of another framework.
    """
    file = _File(given["output"], given["target"], given["changes"])
    machine = _machine(given)
    _check(file, machine)
    found, model = _read(config, given, machine)
    if file.improves:  # a config that cannot be changed is refused before all is priced
        edit_config(load_document(config), found, found.strategy, found.batch)
    audit = prices = None
    if machine is not None:
        asked = given["memory_limit"], given["optimizer"], given["searched"], whole
        about = auditing.PricingOptions(machine, *asked, cached=not given["no_cache"])
        audit = auditing.Audit(found, model, about)
        prices = audit.prices()
    written: Written | None = None
    improved: Improved | None = None
    if file.improves and audit is not None and prices is not None:
        improved = audit.improved(load_document(config), prices)
        written = improved.written if improved is not None else None
    elif file.output is not None:
        written = _changed(config, found, file)
    if file.output is not None and written is not None:
        write_text(file.output, written.text)
    if as_json:
        print_json(_content(found, prices, file, written, improved))
        return
    for line in _text(found, prices, file, written, improved, whole=whole):
        say(line)


def _machine(given: Mapping[str, Any]) -> Machine | None:
    if given["machine"] is None:
        return None
    if given["devices"] is not None:
        raise UsageError("--devices and --machine both say how many ranks there are; give one")
    return named_machines.machine_of(MachineOptions(given["machine"], {}))


def _check(file: _File, machine: Machine | None) -> None:
    """Raise `UsageError` for options that need another one."""
    if file.output is None and (file.changes is not None or file.framework is not None):
        raise UsageError("--with and --to change what -o writes; name the file with -o")
    if file.improves and machine is None:
        raise UsageError(
            "-o writes a changed config; give --machine to have the best one found, or say what"
            " changes with --with or --to"
        )


def _read(
    config: str, given: Mapping[str, Any], machine: Machine | None
) -> tuple[TrainingConfig, auditing.Model | None]:
    """The config of the file and the options, and the model of `--model`."""
    devices = machine.devices if machine is not None else given["devices"]
    found = read_file(config, framework=given["framework"], devices=devices)
    model = auditing.model_named(given["model"]) if given["model"] is not None else None
    if model is not None:
        found = replace(found, model=model.hints)
    return auditing.with_batch(found, given["batch"], given["seq"]), model


def _changed(config: str, found: TrainingConfig, file: _File) -> Written:
    """The config with the changes of the command line, or in another format."""
    strategy = found.strategy.but(**read(file.changes or ""))
    if file.framework is None:
        return edit_config(load_document(config), found, strategy, found.batch)
    return convert_config(found, file.framework, strategy)


def _text(
    found: TrainingConfig,
    prices: ConfigPrices | None,
    file: _File,
    written: Written | None,
    improved: Improved | None,
    *,
    whole: bool,
) -> list[str]:
    lines = audit_text(found, whole=whole)
    if prices is not None:
        lines += prices_text(prices, whole=whole)
    if file.output is None:
        return lines
    lines.append("")
    if improved is not None and prices is not None:
        return lines + improved_text(improved, file.output, prices)
    if written is None:
        return [
            *lines,
            f"not written: {file.output}; no strategy in this format is faster and fits",
        ]
    lines.append(f"wrote {file.output}: {written.strategy}")
    return lines + [f"  not as asked: {reason}" for reason in written.reasons]


def _content(
    found: TrainingConfig,
    prices: ConfigPrices | None,
    file: _File,
    written: Written | None,
    improved: Improved | None,
) -> dict[str, object]:
    """The output of `--json`."""
    content: dict[str, object] = {**audit_json(found)}
    content["prices"] = prices_json(prices) if prices is not None else None
    if improved is not None and prices is not None and file.output is not None:
        content["written"] = improved_json(improved, file.output, prices)
    elif written is not None:
        content["written"] = {
            "file": file.output,
            "strategy": str(written.strategy),
            "reasons": list(written.reasons),
            "text": written.text,
        }
    else:
        content["written"] = None
    return content
