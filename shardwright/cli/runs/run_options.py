"""Options of `shardwright run` beside those of planning, as one value."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from shardwright.cli import options
from shardwright.cli.errors import UsageError
from shardwright.cli.writing import OutputFile, OutputFileOrFolder, OutputFolder
from shardwright.train.launch_options import LaunchOptions, SaveOptions

SAVING = ("every", "keep", "wait_for_saves")  # without effect unless checkpoints are kept

_OPTIONS = (
    click.option(
        "--steps", type=click.IntRange(min=1), help="Steps to train, instead of the job's."
    ),
    click.option(
        "--checkpoint",
        type=OutputFolder(),
        help="Folder of checkpoints: the run resumes from its latest one and saves to it.",
    ),
    click.option(
        "--every",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        help="Steps between checkpoints.",
    ),
    click.option(
        "--keep",
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
        help="Number of checkpoints to keep.",
    ),
    click.option(
        "--wait-for-saves",
        is_flag=True,
        help="Let steps wait until a checkpoint is written, which needs no copy in host memory.",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="How often torchrun starts the ranks again when one dies.",
    ),
    click.option(
        "--stall-timeout",
        type=click.FloatRange(min=0, min_open=True),
        callback=options.finite,
        help="Seconds without a step after which the ranks that hang are named and all end; 600.",
    ),
    click.option(
        "--start-timeout",
        type=click.FloatRange(min=0, min_open=True),
        callback=options.finite,
        help="Seconds for one part of a start (joining, building, reading a checkpoint), after"
        " which the ranks that hang are named and all end; 1800.",
    ),
    click.option(
        "--weights",
        type=click.Path(exists=True),
        help="Initial weights: a .safetensors file, or a Hugging Face folder.",
    ),
    click.option("--compile", "compiled", is_flag=True, help="Run steps through torch.compile."),
    options.tune_host,
    click.option(
        "--tensorboard", type=OutputFolder(), help="Folder for TensorBoard's event files."
    ),
    click.option(
        "--trace",
        type=OutputFile(),
        help="File for the simulated step beside the measured third step of the run.",
    ),
    click.option(
        "--export",
        type=OutputFileOrFolder(".safetensors", make_folder=True),
        help="Where to write the final weights: a .safetensors file, or a Hugging Face folder.",
    ),
    click.option(
        "--verify/--no-verify",
        default=None,
        help="Compare with one device after training; by default where this host has the memory"
        " for it and takes ten minutes at most.",
    ),
)
_LAUNCH = (  # passed on under the same names
    *("steps", "max_restarts", "stall_timeout", "start_timeout", "weights", "export", "compiled"),
    *("tune_host", "tensorboard"),
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The launch of the ranks, the file of a `trace`, and whether to verify after training.

    `verify` None leaves it to the effort (`verifying`).
    """

    launch: LaunchOptions
    trace: str | None
    verify: bool | None


def run_options(function: Callable[..., Any]) -> Any:
    """Decorator: the options of a run as one parameter `training`, a `RunOptions`."""

    @functools.wraps(function)
    def collected(*args: Any, **kwargs: Any) -> Any:
        folder, *saving = (kwargs.pop(name) for name in ("checkpoint", *SAVING))
        trace, verify = kwargs.pop("trace"), kwargs.pop("verify")
        launch = LaunchOptions(
            **{name: kwargs.pop(name) for name in _LAUNCH},
            saving=None if folder is None else SaveOptions(folder, *saving),
            traced=trace is not None,
        )
        return function(*args, training=RunOptions(launch, trace, verify), **kwargs)

    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected


def check_started_once(command: str) -> None:
    """Raise `UsageError` under torchrun: the command would start all ranks again on each rank."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and ranks != "1":
        raise UsageError(
            f"{command} starts its ranks itself, and torchrun has started it {ranks} times: start"
            " it without torchrun; on several hosts give torchrun -m shardwright.train.worker, as"
            " examples/launch/slurm.sh does"
        )
