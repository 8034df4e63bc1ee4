"""Options shared by several commands, and the parsing of their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from shardwright.ir.constraints import parse_constraints
from shardwright.ir.frontier import UNLIMITED, parse_bytes
from shardwright.ir.numerics import CHOICES
from shardwright.ir.optimizers import OptimizerError, known_optimizer
from shardwright.machine.model import MachineError
from shardwright.machine.toml import parse_figures
from shardwright.train.targets.target_text import parse_target

F = TypeVar("F", bound=Callable[..., Any])
_MOST_RANKS = 1024  # processes that one host may be asked for
METHODS = ("joint", "kcut")  # those of `search`, which is not imported for --help


def memory(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Callback of options that are a number of bytes."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as e:
        raise click.BadParameter(str(e), ctx, option) from e


def _limit(ctx: click.Context, option: click.Parameter, text: str | None) -> int | str | None:
    """A number of bytes, or the word for none."""
    return text if text == UNLIMITED else memory(ctx, option, text)


def _number(ctx: click.Context, option: click.Parameter, figure: float) -> float:
    """Callback of options that are a number; ranges let nan pass."""
    if math.isnan(figure):
        raise click.BadParameter("nan is no number", ctx, option)
    return figure


def finite(ctx: click.Context, option: click.Parameter, figure: float | None) -> float | None:
    """Callback of options that are a number, and not without end."""
    if figure is not None and not math.isfinite(figure):
        raise click.BadParameter(f"{figure} is no number of seconds", ctx, option)
    return figure


def ranks(least: int) -> click.IntRange:
    """A number of processes of this host."""
    return click.IntRange(min=least, max=_MOST_RANKS)


def given(*names: str) -> list[str]:
    """The options of the running command among these parameters that the user has given."""
    context = click.get_current_context()
    changed = context.meta.get(_OF_MACHINE) if "machine" in names else None
    found = [f"--set {_OF_MACHINE}{changed}"] if changed else []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is ParameterSource.COMMANDLINE:
            value = context.params.get(parameter.name)
            words = value if isinstance(value, str) else ""
            found.append(f"{parameter.opts[-1]} {words}".rstrip())
    return found


def _optimizer(ctx: click.Context, option: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else known_optimizer(text)
    except OptimizerError as e:
        raise click.BadParameter(str(e), ctx, option) from e


def _counts(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    parts = text.split(",") if text is not None else []
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is no list of counts, as 1,2,4,8", ctx, option)
    return tuple(sorted({int(part) for part in parts}))


def habits(function: F) -> F:
    """`--rng`, `--batch-norm`, `--precision`, as one parameter `habits`: those given, by name."""

    @functools.wraps(function)
    def collected(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in CHOICES}
        chosen = {name: word for name, word in given.items() if word is not None}
        return function(*args, habits=chosen, **kwargs)

    collected = click.option(
        "--precision",
        type=click.Choice(CHOICES["precision"]),
        help="bf16: compute in bfloat16, keep parameters in float32; by default the target's.",
    )(collected)
    collected = click.option(
        "--batch-norm",
        type=click.Choice(CHOICES["batch_norm"]),
        help="Statistics of the whole batch or of each rank's part; by default the target's.",
    )(collected)
    return click.option(
        "--rng",
        type=click.Choice(CHOICES["rng"]),
        help="Random numbers of one device, or of torch's fused kernels; by default the target's.",
    )(collected)  # type: ignore[return-value]


def _settings(ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> Any:
    """`machine=…` is not the target's: it goes before `--machine`, which is read later."""
    names = {parameter.name for parameter in ctx.command.params}
    mine = [text for text in texts if text.startswith(_OF_MACHINE) and "machine" in names]
    if mine:
        ctx.meta[_OF_MACHINE] = mine[-1].removeprefix(_OF_MACHINE)
    return tuple(text for text in texts if text not in mine)


def chosen_machine(ctx: click.Context, option: click.Parameter, text: str | None) -> str:
    """Callback of `--machine`: the machine that `--set machine=…` names goes before it."""
    chosen: str | None = ctx.meta.get(_OF_MACHINE, text)
    if not chosen:
        raise click.MissingParameter(ctx=ctx, param=option)
    return chosen


_OF_MACHINE = "machine="


def _figures(
    ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, object]:
    """Callback of `--set-machine`: figures by name; those that are numbers as numbers."""
    try:
        return parse_figures(",".join(texts)) if texts else {}
    except MachineError as e:
        raise click.BadParameter(str(e), ctx, option) from e


def target(function: F) -> F:
    """TARGET with the sizes that a config.json needs, and changes to try.

    Its text is checked before the command begins.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        parse_target(*(kwargs[name] for name in ("target", "batch", "seq", "settings")))
        return function(*args, **kwargs)

    decorated: Any = click.option(
        "--set",
        "settings",
        multiple=True,
        is_eager=True,
        callback=_settings,
        metavar="NAME=VALUE",
        help="What if: a field of the config.json, an argument of the function, as layers=4, or"
        " another machine, as machine=4xV100.",
    )(checked)
    decorated = click.option(
        "--seq", type=click.IntRange(min=2), help="Tokens per sequence, for a config.json."
    )(decorated)
    decorated = click.option(
        "--batch", type=click.IntRange(min=1), help="Global batch size, for a config.json."
    )(decorated)
    return click.argument("target")(decorated)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PlanOfTarget:
    """TARGET with its sizes and settings, and the file of a plan for it."""

    target: str
    batch: int | None
    seq: int | None
    settings: tuple[str, ...]
    plan: str


def target_and_plan(function: F) -> F:
    """TARGET, its options, and PLAN, as one parameter `given`, a `PlanOfTarget`."""

    @functools.wraps(function)
    def collected(*args: Any, **kwargs: Any) -> Any:
        given = {field.name: kwargs.pop(field.name) for field in fields(PlanOfTarget)}
        return function(*args, given=PlanOfTarget(**given), **kwargs)

    return target(click.argument("plan", type=click.Path(dir_okay=False))(collected))  # type: ignore[return-value]


def _constraint(ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> None:
    found = parse_constraints(f"{option.name} {text}" for text in texts)
    ctx.params["constraints"] = (*ctx.params.get("constraints", ()), *map(str, found))


def constraints(function: F) -> F:
    """What plans must or must not do, as one argument `constraints`."""
    for name, metavar, text in _CONSTRAINTS:
        function = click.option(
            f"--{name}",
            multiple=True,
            expose_value=False,
            callback=_constraint,
            metavar=metavar,
            help=text,
        )(function)
    return function


_CONSTRAINTS = (
    ("cap", "AXIS=SIZE", "Widest that a mesh axis may be, as tp=4."),
    (
        "mesh",
        "AXIS=SIZE,…",
        "Plan on this mesh only, as dp=4,tp=2; several are alternatives. With --stages 2 that of"
        " one stage's group, or of all devices as pp=2,dp=4.",
    ),
    ("forbid", "GLOB=AXIS:WORD", "What modules or parameters must not do, as '*=dp:sequence'."),
    (
        "pin",
        "GLOB=AXIS:WORD",
        "What modules split, as 'layers.*.mlp=tp:features', or how parameters are stored, as"
        " '*.weight=dp:S(0)', in the words of `explain`.",
    ),
)
seconds = click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    callback=_number,
    default=math.inf,
    help="Search about so long at most, and take the best so far.",
)
time_operators = click.option(
    "--time-operators",
    type=click.FloatRange(min=0, max=600),
    callback=finite,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="With --machine here: time operators that dominate and are not remembered yet; 0: go"
    " without timings.",
)
machine = click.option(
    "--machine", callback=chosen_machine, help="Preset such as 8xH100, TOML file, or `here`."
)
set_machine = click.option(
    "--set-machine",
    "figures",
    multiple=True,
    callback=_figures,
    metavar="NAME=VALUE,…",
    help="Other figures of the machine, named as in its file, as memory=72GiB,overlap=0.6.",
)
device_counts = click.option(
    "--devices", callback=_counts, metavar="N,N,…", help="Device counts to compare, as 1,2,4,8."
)
micro_batches = click.option(
    "--micro-batches",
    callback=_counts,
    metavar="N,N,…",
    help="Numbers of micro-batches that a step may take its batch in, as 1,2,4; by default more"
    " than one where the memory limit makes plans slower or rules all out.",
)
stages = click.option(
    "--stages",
    callback=_counts,
    metavar="N,N,…",
    help="Numbers of pipeline stages to search, as 1,2,4; by default 1, no pipelines.",
)
allow_async = click.option(
    "--async",
    "allow_async",
    is_flag=True,
    help="Allow asynchronous pipelines, which train otherwise than one device: docs/async.md.",
)
optimizer = click.option(
    "--optimizer",
    callback=_optimizer,
    help="Plan the memory and update of this one instead of the target's.",
)
memory_limit = click.option(
    "--memory-limit",
    callback=_limit,
    metavar="SIZE",
    help="Most memory per device, as 40GiB; by default what the device has. `unlimited` plans past"
    " it.",
)
method = click.option(
    "--method",
    type=click.Choice(METHODS),
    default=METHODS[0],
    show_default=True,
    help="All axes at once for time and memory, or SoyBean's k-cut: one axis after the other.",
)
as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."
)
