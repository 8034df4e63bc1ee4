"""`shardwright profile`: measures the devices and links of this host and writes a machine file."""

from __future__ import annotations

import os

import click

from shardwright.cli import options
from shardwright.cli.console import print_json, say, working, wrapped
from shardwright.cli.errors import UsageError
from shardwright.cli.writing import OutputFile, write_text
from shardwright.machine.files.toml import to_toml
from shardwright.machine.model import SKEWED_SECONDS, Machine
from shardwright.report.units import milliseconds, size


@click.command("profile")
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    help="Machine file to write; without it, the cached figures of `--machine here` are renewed.",
)
@click.option(
    "--devices",
    type=options.ranks(1),
    help="Devices of this host to measure together; by default all. Under torchrun: its ranks.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=600),
    callback=options.finite,
    default=60.0,
    show_default=True,
    help="Seconds to measure, beside the start of the processes.",
)
@options.tune_host
@options.as_json
def command(
    output: str | None, devices: int | None, seconds: float, tune_host: bool, as_json: bool
) -> None:
    """Measure matmul, convolution, attention, memory and collectives; write a machine file.

    Alone it starts a process per device of this host; under torchrun it
    measures the ranks that torchrun has started, on one host or several.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if output is None and launched:
        raise UsageError(
            "ranks of torchrun write a machine file: give its path with -o machine.toml"
        )
    if not launched:
        machine: Machine | None = _this_host(devices, seconds, tune_host)
    elif devices is not None:
        raise UsageError(
            f"--devices {devices} under torchrun, which has started {os.environ['WORLD_SIZE']}"
            " ranks; leave it out"
        )
    else:
        machine = _these_ranks(seconds, tune_host)
    if machine is None:
        return  # only rank 0 writes and prints
    if output is not None:
        write_text(output, to_toml(machine))
    if as_json:
        print_json(content(machine, output))
        return
    for line in in_words(machine):
        click.echo(wrapped(line))
    for doubt in machine.measured.doubts if machine.measured else ():
        click.echo(wrapped(f"warning: {doubt}; measure again", 0), err=True)
    if output is not None:
        say(f"wrote {output}; use it as --machine {output}")
    else:
        kind = "`run --tune-host`" if tune_host else "--machine here"
        say(f"kept for {kind} with {machine.devices} devices")


def content(machine: Machine, output: str | None) -> dict[str, object]:
    """The output of `profile --json`."""
    device = machine.device
    return {
        "name": machine.name,
        "devices": machine.devices,
        "flop_per_s": dict(device.flop_per_s),
        "bytes_per_s": device.bytes_per_s,
        "launch_seconds": device.launch_seconds,
        "memory_bytes": device.memory_bytes,
        "context_bytes": device.context_bytes,
        "workspace_bytes": device.workspace_bytes,
        "overlap": machine.overlap,
        "gather_overlap": machine.soon_overlap,
        "contention": machine.contention,
        "levels": [
            {"name": level.name, "size": level.size, "bytes_per_s": level.bytes_per_s}
            for level in machine.levels
        ],
        "provenance": machine.provenance,
        "doubts": machine.measured.doubts if machine.measured else (),
        "tuned_host": machine.measured is not None and machine.measured.tuned_host,
        "file": output,
    }


def in_words(machine: Machine) -> list[str]:
    """A text of the machine: a line for the device, one per level, and the figures' origin."""
    device = machine.device
    peaks = ", ".join(f"{dtype} {peak / 1e9:,.0f} GFLOP/s" for dtype, peak in device.flop_per_s)
    lines = [
        f"{machine}: {peaks}; {device.bytes_per_s / 1e9:,.1f} GB/s of {size(device.memory_bytes)}"
        f" memory; {_short(device.launch_seconds)} a launch"
    ]
    lines += [
        f"{level.name} of {level.size}: {level.bytes_per_s / 1e9:.3g} GB/s a device,"
        f" {_short(level.latency_seconds)} a hop,"
        f" {_short(machine.collective_launch_seconds)} a call"
        for level in machine.levels
        if level.size > 1
    ]
    if machine.devices > 1:
        lines.append(
            f"{machine.overlap:.0%} of a gradient sum hides behind computing, and"
            f" {machine.soon_overlap:.0%} of a gather; collectives along two axes at once delay"
            f" each other by {machine.contention:.0%}"
        )
    if machine.arrival_skew_seconds:
        lines.append(
            f"after computing for {milliseconds(SKEWED_SECONDS)} a rank waits"
            f" {milliseconds(machine.arrival_skew_seconds)} for the last one; that grows with the"
            f" time to the power {machine.arrival_skew_power:g}"
        )
    return [*lines, *_origin(machine)]


def _short(seconds: float) -> str:
    """Microseconds with three digits."""
    return f"{seconds * 1e6:.3g} us"


def _origin(machine: Machine) -> list[str]:
    """The origin of the figures, and the error of the fit."""
    if machine.measured is None:
        return [machine.provenance]
    fits = [
        f"{kind} {middle:.0%} (at most {most:.0%})"
        for kind, middle, most in machine.measured.errors
    ]
    busy = f"others took {machine.measured.busy:.0%} of the cores"
    tuned = "; the host is tuned" if machine.measured.tuned_host else ""
    return [f"{machine.provenance}{tuned}; {busy}; median error of the fit: {', '.join(fits)}"]


def _this_host(devices: int | None, seconds: float, tune_host: bool) -> Machine:
    with working("measuring this host") as tell:
        from shardwright.cli.planning.named_machines import devices_here
        from shardwright.profile.measure import measure_host

        count = devices or devices_here()
        return measure_host(count, seconds, tell=tell, anew=True, tune_host=tune_host)


def _these_ranks(seconds: float, tune_host: bool) -> Machine | None:
    """The machine on rank 0, None on the other ranks."""
    import torch.distributed as dist

    from shardwright.machine.backends import backend_on
    from shardwright.profile.local_ranks import silent
    from shardwright.profile.measure import measure_ranks
    from shardwright.runtime.comm.shutdown import leave
    from shardwright.runtime.device import bound, rank_device

    local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = rank_device(*local)
    dist.init_process_group(backend_on(device.type).name, device_id=bound(device))
    try:
        if dist.get_rank():
            measure_ranks(seconds, silent, tune_host=tune_host)
            return None
        with working("measuring these ranks") as tell:
            return measure_ranks(seconds, tell, tune_host=tune_host)
    finally:
        leave()
