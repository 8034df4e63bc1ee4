"""Groups of options that several commands share, each as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from shardwright.cli import options
from shardwright.ir.options.numerics import CHOICES
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.train.targets.target_text import Target, parse_target

Command = Callable[..., Any]
_OF_TARGET = ("target", "batch", "seq", "settings", "no_cache")


@dataclass(frozen=True, slots=True)
class PlanOfTarget:
    """TARGET and the file of its plan."""

    target: Target
    plan: str


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """A machine's name, changed figures, and seconds for timing operators if it is this host."""

    text: str
    figures: Mapping[str, object]
    timing_seconds: float = 0.0

    @property
    def is_here(self) -> bool:
        """Whether the machine is this host."""
        return self.text == "here"


def target(function: Command) -> Command:
    """Decorator: TARGET and its options as one parameter `target`.

    Its text is checked before the command begins.
    """

    @functools.wraps(function)
    def collected(*args: Any, **kwargs: Any) -> Any:
        text, batch, seq, settings, no_cache = (kwargs.pop(name) for name in _OF_TARGET)
        parse_target(text, batch, seq, settings)
        chosen = Target(text, batch, seq, settings, not no_cache)
        return function(*args, target=chosen, **kwargs)

    named = options.batch, options.seq, options.settings, options.no_cache
    return click.argument("target")(_with(collected, *named))


def target_and_plan(function: Command) -> Command:
    """Decorator: TARGET, its options, and PLAN, as one parameter `given`, a `PlanOfTarget`."""

    @functools.wraps(function)
    def collected(*args: Any, **kwargs: Any) -> Any:
        given = PlanOfTarget(kwargs.pop("target"), kwargs.pop("plan"))
        return function(*args, given=given, **kwargs)

    return target(click.argument("plan", type=click.Path(dir_okay=False))(collected))


def machine(*, default: str | None = None, timed: bool = False) -> Callable[[Command], Command]:
    """Decorator: `--machine` and its figures as `machine`; with `timed`, `--time-operators`."""

    def decorated(function: Command) -> Command:
        @functools.wraps(function)
        def collected(*args: Any, **kwargs: Any) -> Any:
            text, figures = kwargs.pop("machine"), kwargs.pop("figures")
            seconds = kwargs.pop("time_operators", 0.0)
            chosen = MachineOptions(text, figures, seconds if text == "here" else 0.0)
            return function(*args, machine=chosen, **kwargs)

        further = (options.time_operators,) if timed else ()
        return _with(collected, options.machine(default), options.set_machine, *further)

    return decorated


def plan_options(*names: str) -> Callable[[Command], Command]:
    """Decorator: the search options of these names as one parameter `wanted`."""

    def decorated(function: Command) -> Command:
        @functools.wraps(function)
        def collected(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in names}
            asked = {name: value for name, value in given.items() if value not in (None, ())}
            return function(*args, wanted=PlanOptions.of(**asked), **kwargs)

        return _with(collected, *(options.search[name] for name in names))

    return decorated


def numerics(function: Command) -> Command:
    """Decorator: those given of `--rng`, `--batch-norm`, `--precision` and so on: `numerics`."""

    @functools.wraps(function)
    def collected(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in CHOICES}
        chosen = {name: word for name, word in given.items() if word is not None}
        return function(*args, numerics=chosen, **kwargs)

    return _with(collected, *options.numerics)


@dataclass(frozen=True, slots=True)
class EnumerationOptions:
    """The strategies that are enumerated: arguments of `shardwright.strategies`."""

    tp_across_hosts: bool
    fp8: str | None


def enumeration(function: Command) -> Command:
    """Decorator: `--tp-across-hosts` and `--fp8` as one parameter `enumerated`."""

    @functools.wraps(function)
    def collected(*args: Any, **kwargs: Any) -> Any:
        chosen = EnumerationOptions(kwargs.pop("tp_across_hosts"), kwargs.pop("fp8"))
        return function(*args, enumerated=chosen, **kwargs)

    return _with(collected, options.tp_across_hosts, options.fp8)


def _with(function: Command, *decorators: Callable[[Command], Command]) -> Command:
    """`function` with these options, in this order in the help."""
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
