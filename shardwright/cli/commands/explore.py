"""`shardwright explore`: a page on loopback that plans again when its sliders move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import click

from shardwright.cli import groups, options
from shardwright.cli.errors import UsageError
from shardwright.cli.explore.background import Answer, Background, Values
from shardwright.cli.explore.explorer import Explored, Explorer
from shardwright.cli.explore.server import Content, PageServer
from shardwright.cli.explore.sliders import Slider, chosen, sliders
from shardwright.cli.groups import MachineOptions
from shardwright.cli.planning import named_machines, searching
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.planner.memory_limits import limit_on
from shardwright.report.page import embedded, script
from shardwright.train.targets.target_text import Target

_WAIT = 0.5  # seconds that a request waits for a plan; then the page asks again
_REPORT_WAIT = 600.0  # seconds that the report waits for one


@click.command("explore")
@groups.target
@groups.machine()
@groups.plan_options(
    *(
        "memory_limit",
        "constraints",
        "seconds",
        "method",
        "micro_batches",
        "stages",
        "loss_chunks",
        "mlp_chunks",
    )
)
@options.optimizer
@groups.numerics
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on loopback; by default a free one.",
)
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
def command(
    target: Target,
    machine: MachineOptions,
    wanted: PlanOptions,
    optimizer: str | None,
    numerics: Mapping[str, str],
    port: int,
    opened: bool,
) -> None:
    """Plan TARGET on a page with sliders: devices, memory, batch and sequence.

    The page is served on loopback only, to whoever has its address; Ctrl-C ends it.
    """
    known = named_machines.machine_of(machine)
    searching.check([known], wanted, target.batch)
    explorer = Explorer(target, known, wanted, optimizer, numerics)
    limit = limit_on(known, wanted.memory_limit)
    title = f"{target.text} on {known}"
    server = server_of(explorer.find, sliders(target, known, limit), title, port)
    with server:
        explorer.capture()  # a target without a model ends here, and not on the page
        click.echo(f"exploring {title}: {server.address}")
        click.echo("only this machine can open it; Ctrl-C ends it")
        if opened:
            click.launch(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("ended")


def server_of(
    find: Callable[[Values], Explored], shown: Sequence[Slider], title: str, port: int
) -> PageServer:
    """A server, not yet running, of a page with these sliders, its plans and their reports."""
    try:
        text = _page(title, shown)
    except ImportError as e:
        raise UsageError(
            f"the page needs {e.name}, which is not installed: pip install 'shardwright[report]'"
        ) from e
    plans = Background(find)

    def page(_: dict[str, str]) -> Content:
        return text

    def plan(query: dict[str, str]) -> Content:
        return _content(plans.ask(chosen(shown, query), _WAIT))

    def report(query: dict[str, str]) -> Content:
        return _report(plans, chosen(shown, query), title)

    return PageServer(port, {"/": page, "/plan": plan, "/report": report})


def _content(answer: Answer[Explored] | None) -> dict[str, Any]:
    """The content of the page: a plan that is known, refused, or still to be found."""
    if answer is None:
        return {"state": "planning"}
    if answer.found is None:
        return {"state": "failed", "error": answer.error}
    return {"state": "done", **answer.found.content}


def _report(plans: Background[Explored], values: Values, title: str) -> str:
    answer = plans.ask(values, _REPORT_WAIT)
    if answer is None or answer.found is None:
        raise UsageError((answer.error if answer else None) or "the plan is not found yet")
    sizes = ", ".join(f"{name} {value}" for name, value in values.items() if name != "memory")
    return answer.found.report(f"{title}: {sizes}")


def _page(title: str, known: Sequence[Slider]) -> str:
    """The page, with these sliders; raises `ImportError` without the template engine."""
    from jinja2 import Environment
    from markupsafe import Markup

    web = files("shardwright.report") / "web"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((web / "explore.html.j2").read_text())
    return template.render(
        title=title,
        style=Markup((web / "page.css").read_text()),
        script=script("explore.js"),
        data=Markup(embedded({"sliders": [asdict(slider) for slider in known]})),
    )
