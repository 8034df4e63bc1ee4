"""Options shared by several commands, and the parsing of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from shardwright.ir.frontier import MOST_SETTLED, UNLIMITED, parse_bytes
from shardwright.ir.options.constraints import parse_constraints
from shardwright.ir.options.numerics import CHOICES
from shardwright.ir.options.optimizers import OptimizerError, known_optimizer
from shardwright.ir.options.plan_options import AUTO, METHODS
from shardwright.ir.strategy.fields import FP8
from shardwright.machine.files.figures import parse_figures
from shardwright.machine.model import MachineError

F = TypeVar("F", bound=Callable[..., Any])
_MOST_RANKS = 1024  # the most processes on one host
_MOST_SEARCHING = 8  # processes by default: more take more memory and save little time


def memory(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Callback of options that are a number of bytes."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as e:
        raise click.BadParameter(str(e), ctx, option) from e


def _limit(ctx: click.Context, option: click.Parameter, text: str | None) -> int | str | None:
    """Parse a number of bytes, or the word for no limit."""
    return text if text == UNLIMITED else memory(ctx, option, text)


def _number(ctx: click.Context, option: click.Parameter, figure: float) -> float:
    """Callback of numeric options that rejects NaN, which ranges accept."""
    if math.isnan(figure):
        raise click.BadParameter("nan is no number", ctx, option)
    return figure


def finite(ctx: click.Context, option: click.Parameter, figure: float | None) -> float | None:
    """Callback of numeric options that rejects NaN and infinity."""
    if figure is not None and not math.isfinite(figure):
        raise click.BadParameter(f"{figure} is no number of seconds", ctx, option)
    return figure


def ranks(least: int) -> click.IntRange:
    """The type of a number of processes of this host, at least `least`."""
    return click.IntRange(min=least, max=_MOST_RANKS)


def _cores() -> int:
    """The default number of processes that search."""
    from shardwright.planner.processes.forked_map import usable_cores

    return min(_MOST_SEARCHING, usable_cores())


def tune_host(command: F) -> F:
    """Decorator: the option that lets ranks on CPUs change how the host runs them."""
    return click.option(
        "--tune-host",
        is_flag=True,
        help="Have ranks on CPUs keep freed memory, schedule Gloo's threads as a batch, and stay"
        " awake in short waits; by default they run as the host runs any process.",
    )(command)


def given(*names: str) -> list[str]:
    """The options of the running command, of these names, that the user has given."""
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


def _stages(ctx: click.Context, option: click.Parameter, text: str | None) -> object:
    return AUTO if text == AUTO else _counts(ctx, option, text)


def _settings(ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> Any:
    """Callback of `--set`: moves `machine=…` to `--machine`, which is read later."""
    names = {parameter.name for parameter in ctx.command.params}
    mine = [text for text in texts if text.startswith(_OF_MACHINE) and "machine" in names]
    if mine:
        ctx.meta[_OF_MACHINE] = mine[-1].removeprefix(_OF_MACHINE)
    return tuple(text for text in texts if text not in mine)


def machine(default: str | None = None) -> Callable[[F], F]:
    """Decorator: `--machine`, with a default or required."""
    if default is not None:
        return click.option(
            "--machine",
            default=default,
            show_default=True,
            callback=_machine,
            help="Machine to plan for.",
        )
    return click.option(
        "--machine", callback=_machine, help="Preset such as 8xH100, TOML file, or `here`."
    )


def _machine(ctx: click.Context, option: click.Parameter, text: str | None) -> str:
    """Callback of `--machine`; a machine given by `--set machine=…` takes precedence."""
    chosen: str | None = ctx.meta.get(_OF_MACHINE, text)
    if not chosen:
        raise click.MissingParameter(ctx=ctx, param=option)
    return chosen


_OF_MACHINE = "machine="


def _figures(
    ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, object]:
    """Callback of `--set-machine`: figures by name, numbers converted."""
    try:
        return parse_figures(",".join(texts)) if texts else {}
    except MachineError as e:
        raise click.BadParameter(str(e), ctx, option) from e


def _constraint(ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> None:
    found = parse_constraints(f"{option.name} {text}" for text in texts)
    ctx.params["constraints"] = (*ctx.params.get("constraints", ()), *map(str, found))


def constraints(function: F) -> F:
    """Decorator: the constraints on plans as one argument `constraints`."""
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
        "AXIS=SIZE,…|SHAPE",
        "Plan on this mesh only, by roles as dp=4,tp=2 or by sizes as 4x2, whose axes may do"
        " anything; several are alternatives. With --stages 2 that of one stage's group, or of"
        " all devices as pp=2,dp=4 or 2x4.",
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
    help="Time limit of the search, in seconds; the best plan so far is simulated and returned.",
)
processes = click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=_cores,
    show_default=f"cores, up to {_MOST_SEARCHING}",
    help="Processes that search; their number changes no plan.",
)
time_operators = click.option(
    "--time-operators",
    type=click.FloatRange(min=0, max=600),
    callback=finite,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="With --machine here: time dominating operators without a cached timing; 0"
    " uses no timings.",
)
set_machine = click.option(
    "--set-machine",
    "figures",
    multiple=True,
    callback=_figures,
    metavar="NAME=VALUE,…",
    help="Changed figures of the machine, named as in its file: memory=72GiB,overlap=0.6.",
)
device_counts = click.option(
    "--devices",
    callback=_counts,
    metavar="N,N,…",
    help="Device counts to compare, such as 1,2,4,8.",
)
micro_batches = click.option(
    "--micro-batches",
    callback=_counts,
    metavar="N,N,…",
    help="Numbers of micro-batches that a step may take its batch in, as 1,2,4; by default more"
    " than one where the memory limit makes plans slower or rules all out.",
)
loss_chunks = click.option(
    "--loss-chunks",
    callback=_counts,
    metavar="N,N,…",
    help="Parts of the vocabulary in which a step may compute its loss, as 1,8; by default more"
    " than one where the memory limit makes plans slower or rules all out.",
)
mlp_chunks = click.option(
    "--mlp-chunks",
    callback=_counts,
    metavar="N,N,…",
    help="Parts of a rank's rows in which a step may compute its MLPs, as 1,8; by default more"
    " than one where the memory limit makes plans slower or rules all out.",
)
points = click.option(
    "--points",
    type=click.IntRange(min=2),
    default=MOST_SETTLED,
    show_default=True,
    help="Plans to simulate at most, evenly spaced, about two seconds each for large models; with"
    " hundreds, neighbours are a per cent of memory apart.",
)
stages = click.option(
    "--stages",
    callback=_stages,
    metavar="N,N,…",
    help="Numbers of pipeline stages to search, as 1,2,4, or auto, the default: on several hosts"
    " pipelines around the best uniform strategies; 1 is no pipelines.",
)
allow_async = click.option(
    "--async",
    "allow_async",
    is_flag=True,
    help="Allow asynchronous pipelines, which do not train as one device: docs/how-to/async.md.",
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
batch = click.option(
    "--batch", type=click.IntRange(min=1), help="Global batch size, for a config.json."
)
seq = click.option(
    "--seq", type=click.IntRange(min=2), help="Tokens per sequence, for a config.json."
)
settings = click.option(
    "--set",
    "settings",
    multiple=True,
    is_eager=True,
    callback=_settings,
    metavar="NAME=VALUE",
    help="What if: a field of the config.json, an argument of the function, as layers=4, or"
    " another machine, as machine=4xV100.",
)
no_cache = click.option(
    "--no-cache",
    is_flag=True,
    envvar="SHARDWRIGHT_NO_CACHE",
    help="Capture a config.json anew, and keep nothing in the user's cache folder.",
)
tp_across_hosts = click.option(
    "--tp-across-hosts",
    is_flag=True,
    help="Also try tensor parallelism beyond the innermost links.",
)
fp8 = click.option(
    "--fp8",
    type=click.Choice(FP8),
    help="Products in 8 bits in all strategies; tensorwise and rowwise are executed.",
)
numerics = (
    click.option(
        "--rng",
        type=click.Choice(CHOICES["rng"]),
        help="Random numbers of one device, or of torch's fused kernels; by default the target's.",
    ),
    click.option(
        "--batch-norm",
        type=click.Choice(CHOICES["batch_norm"]),
        help="Statistics of the whole batch or of each rank's part; by default the target's.",
    ),
    click.option(
        "--precision",
        type=click.Choice(CHOICES["precision"]),
        help="bf16, fp16: compute in bfloat16, or in float16 with a scaled loss, and keep"
        " parameters in float32; tf32: in float32, products in TF32 where GPUs have it; model: in"
        " the dtypes of the model as it is built. By default the"
        " job's; that of a config.json in 16 bits is bf16 where devices are faster in it, else"
        " fp16 for one in float16.",
    ),
    click.option(
        "--reduce",
        type=click.Choice(CHOICES["reduce"]),
        help="bf16, fp16: devices sum gradients in 16 bits, with that precision; by default as"
        " stored.",
    ),
    click.option(
        "--norms",
        type=click.Choice(CHOICES["norms"]),
        help="fused: RMS norms are one kernel each; model: as the model computes them.",
    ),
    click.option(
        "--logits",
        type=click.Choice(CHOICES["logits"]),
        help="fused: losses cast half-precision logits to float32 for some rows at a time; model:"
        " all at once, as the model does.",
    ),
)
search: Mapping[str, Callable[[Any], Any]] = {  # by the names of `PlanOptions`
    "method": method,
    "constraints": constraints,
    "micro_batches": micro_batches,
    "memory_limit": memory_limit,
    "stages": stages,
    "allow_async": allow_async,
    "loss_chunks": loss_chunks,
    "mlp_chunks": mlp_chunks,
    "points": points,
    "seconds": seconds,
    "processes": processes,
}
