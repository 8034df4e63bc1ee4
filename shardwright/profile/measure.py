"""Measures devices and links for the cost model.

All ranks measure at the same time, so that they share memory and cores as in training. `probes`,
`update_probes` and `link_probes` define the samples, `timing` takes them, and `fit` fits the
figures of the machine.
"""

from __future__ import annotations

import gc
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.ir.atomic_io import write_atomically
from shardwright.ir.layout import Bytes, Seconds
from shardwright.machine.files.loading import load_machine
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.host_memory import host_bytes
from shardwright.machine.measurement import Measured
from shardwright.machine.model import PLAIN_BLOCK, Device, Level, Machine, MachineError
from shardwright.machine.presets import KINDS
from shardwright.machine.presets import preset as machine_preset
from shardwright.profile import link_probes, probes, update_probes
from shardwright.profile.fit import (
    ComputeFigures,
    LinkFigures,
    fit_compute,
    fit_contention,
    fit_links,
    fit_overlap,
    fit_skew,
)
from shardwright.profile.local_ranks import START_SECONDS, Tell, join, run_ranks, silent
from shardwright.profile.timing import Sample, Stopwatch
from shardwright.runtime.backend.registry import backend_of

_FREE_MEMORY = 2**28  # bytes: results and temporaries of the largest probes


def measure_here(devices: int | None = None, *, tune_host: bool = False) -> Machine:
    """Measure the ranks of the process group if there is one, else new processes on this host.

    Args:
        devices: the number of new processes; None: one for each GPU, or for each core without GPUs.
        tune_host: whether the ranks change how the host runs them (`runtime/backend/gloo.py`).

    Raises:
        MachineError: `devices` is not positive, or new processes fail.
    """
    if dist.is_initialized():
        return measure_ranks(tune_host=tune_host)
    here = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    return measure_host(here if devices is None else devices, tune_host=tune_host)


def measure_host(
    devices: int,
    seconds_budget: float = 15.0,
    cache_dir: Path | None = None,
    *,
    tell: Tell = silent,
    anew: bool = False,
    tune_host: bool = False,
) -> Machine:
    """The machine `here`: `devices` GPUs of this host, or as many processes that share its CPU.

    The result is cached. Later calls read it, unless its figures are doubtful
    (`Measured.doubts`). The processes are spawned, so a script must call this under
    `if __name__ == "__main__"`.

    Args:
        devices: the number of processes, one for each device.
        seconds_budget: about the seconds that measuring takes, without the start of the processes.
        cache_dir: the folder of the cached result; None: `user_cache()`.
        tell: called with the progress.
        anew: whether to measure even if there is a cached result.
        tune_host: whether the processes change how the host runs them (`runtime/backend/gloo.py`).

    Raises:
        MachineError: `devices` is not positive, or the processes fail or make no progress.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise MachineError(f"{devices!r} devices to measure; ask for at least one")
    file = (cache_dir or user_cache()) / _cache_name(devices, tune_host)
    if not anew:
        with suppress(MachineError):  # missing, damaged, or of an older format
            kept = load_machine(file)
            if kept.measured is not None and not kept.measured.doubts:
                return kept
    machine = _measure(devices, seconds_budget, tell, tune_host)
    with suppress(OSError):  # no cache directory: the next call measures again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, to_toml(machine))
    return machine


def measure_ranks(
    seconds_budget: float = 15.0, tell: Tell = silent, *, tune_host: bool = False
) -> Machine:
    """The machine of the ranks of the process group; equal on every rank, and all call it.

    Ranks of one host (`LOCAL_WORLD_SIZE`, which torchrun sets) form its inner level, hosts the
    outer one.

    Args:
        seconds_budget: about the seconds that measuring takes.
        tell: called with the progress.
        tune_host: whether these ranks change how the host runs them, until they end.
    """
    world, backend = dist.get_world_size(), backend_of()
    kind = backend.spec.device
    used = torch.cuda.memory_allocated() if kind == "cuda" else 0  # by the caller's tensors
    if tune_host:
        backend.tune_host()
    levels = _levels(kind, world)
    stopwatch = Stopwatch(kind, seconds_budget, tell)
    probes.add_all(stopwatch)
    update_probes.add_all(stopwatch)
    link_probes.add_all(stopwatch, levels)
    backend.tune_new_groups()
    stopwatch.access(_FREE_MEMORY)
    samples = stopwatch.samples()
    sizes = {name: mesh.size() for name, mesh in levels.items()}
    found: list[tuple[float, int, int]] = [(0.0, 0, 0)] * world
    busy = stopwatch.busy
    del stopwatch  # with the tensors of its probes
    taken = (0, 0)
    if kind == "cuda":
        taken = context_bytes(torch.cuda), max(0, workspace_bytes() - used)
    dist.all_gather_object(found, (_memory_bytes(kind, sizes.get("host", 1)), *taken))
    memory = min(size for size, *_ in found)
    context, workspace = (max(sizes) for sizes in list(zip(*found, strict=True))[1:])
    sizes_of = Bytes(int(memory)), Bytes(context), Bytes(workspace)
    return _machine(samples, sizes, sizes_of, busy)


def _levels(kind: str, world: int) -> dict[str, DeviceMesh]:
    """The mesh along each level of more than one rank, innermost first."""
    local = ranks_of_a_host(world)
    sizes = {"network": world // local, "host": local}
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: mesh[name] for name in ("host", "network") if sizes[name] > 1}


def ranks_of_a_host(world: int) -> int:
    """The number of ranks on a host, from torchrun's environment.

    It is `world` without that, or if it does not divide `world`.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return local if local > 0 and world % local == 0 else world


def _measure(devices: int, seconds_budget: float, tell: Tell, tune_host: bool) -> Machine:
    """Measure the machine with new processes."""
    return parse_toml(run_ranks(devices, _rank, (seconds_budget, tune_host), tell, START_SECONDS))


def _rank(
    rank: int, devices: int, folder: str, seconds_budget: float, tune_host: bool = False
) -> None:
    def measured(tell: Tell) -> str:
        return to_toml(measure_ranks(seconds_budget, tell))

    join(rank, devices, folder, measured, tune_host=tune_host)


def _machine(
    samples: list[Sample], sizes: dict[str, int], memory: tuple[Bytes, Bytes, Bytes], busy: float
) -> Machine:
    """The machine fitted to `samples`.

    Args:
        samples: the samples of all probes.
        sizes: members of each level, innermost first.
        memory: bytes of a device, and those taken by its context and by libraries' workspaces.
        busy: the fraction of the cores that other processes used.
    """
    backend = backend_of()
    gpu, world = backend.spec.device == "cuda", dist.get_world_size()
    kind = torch.cuda.get_device_name() if gpu else "cpu"
    known = _fallback_preset(kind, sizes.get("host", 1))
    compute = fit_compute(samples, known.device)
    terms = backend.spec.receives_terms
    links = {name: fit_links(samples, name, size, terms, known) for name, size in sizes.items()}
    levels = [
        Level(
            name, sizes[name], link.bytes_per_s, Seconds(link.hop_seconds), link.gather_bytes_per_s
        )
        for name, link in links.items()
    ]
    launches = [link.launch_seconds for link in links.values()]
    skew, power = fit_skew(samples)
    shape = "x".join(str(size) for size in reversed(sizes.values())) or "1"
    contention = fit_contention(samples)
    hidden = {kind: _overlap(samples, links, kind) for kind in ("all_reduce", "all_gather")}
    assumed = [*compute.assumed, *(name for link in links.values() for name in link.assumed)]
    assumed += [f"overlap of {kind}" for kind, part in hidden.items() if links and part is None]
    assumed += ["contention"] * (contention is None) + ["host_bandwidth"] * gpu
    return Machine(
        name=f"{shape}x{kind} of {socket.gethostname()}",
        device=Device(
            kind=kind,
            memory_bytes=memory[0],
            flop_per_s=compute.flop_per_s,
            bytes_per_s=compute.bytes_per_s,
            launch_seconds=Seconds(compute.launch_seconds),
            efficiency=compute.efficiency,
            dispatch_seconds=Seconds(compute.dispatch_seconds),
            parameter_seconds=Seconds(compute.parameter_seconds),
            packing_seconds=Seconds(compute.packing_seconds),
            context_bytes=memory[1],
            workspace_bytes=memory[2],
            channel_block=channel_block_here(),
            issue_seconds=Seconds(compute.issue_seconds),
            host_memory_bytes=Bytes(int(_memory_bytes("cpu", sizes.get("host", 1)))),
            host_bytes_per_s=_host_bytes_per_s(gpu, compute, known),
        ),
        levels=tuple(levels)
        or (Level("host", 1, 1e12, Seconds(0.0)),),  # a single rank has no links
        provenance=_provenance(world, gpu, assumed, known.name),
        backend=backend.spec.name,
        collective_launch_seconds=Seconds(max(launches, default=0.0)),
        overlap=hidden["all_reduce"] or 0.0,
        gather_overlap=hidden["all_gather"],
        contention=known.contention if contention is None else contention,
        arrival_skew_seconds=Seconds(skew),
        arrival_skew_power=power,
        measured=Measured(
            _rank_0_time(),
            float(f"{busy:.3g}"),
            tuple(_errors(compute, links)),
            tuple(assumed),
            known.name if assumed else "",
            backend.tuned,
        ),
    )


def _fallback_preset(kind: str, devices: int) -> Machine:
    """The preset whose figures replace those with too few usable samples.

    It has two hosts, and the device that `kind` names, or A100s if that is unknown.
    """
    if kind == "cpu":
        return machine_preset(f"2x{devices}xcpu")
    same = [name for name in KINDS if name != "cpu" and name.lower() in kind.lower()]
    return machine_preset(f"2x8x{max(same, key=len, default='A100')}")


def _overlap(samples: list[Sample], links: Mapping[str, LinkFigures], kind: str) -> float | None:
    """The overlap of collectives with computation on the outermost level; None if unknown."""
    *_, outermost = (None, *links.values())
    return None if outermost is None else fit_overlap(samples, outermost, kind)


def _host_bytes_per_s(gpu: bool, compute: ComputeFigures, known: Machine) -> float | None:
    """The rate of copies to the host: of a GPU as `known`; a CPU reads and writes each byte."""
    if gpu:
        return known.device.host_bytes_per_s
    return compute.bytes_per_s * compute.efficiency.streaming / 2


def _rank_0_time() -> datetime:
    """The time on rank 0, on every rank, so that all ranks return equal machines."""
    found = [datetime.now(UTC).replace(microsecond=0)]
    dist.broadcast_object_list(found, 0)
    return found[0]


def _errors(
    compute: ComputeFigures, links: dict[str, LinkFigures]
) -> Iterator[tuple[str, float, float]]:
    every = dict(compute.errors)
    for level, link in links.items():
        every |= {f"{level} {kind}": errors for kind, errors in link.errors.items()}
    for kind, (middle, most) in every.items():
        yield kind, float(f"{middle:.2g}"), float(f"{most:.2g}")


def channel_block_here() -> int:
    """`Device.channel_block` of this host's processor."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return 2 * PLAIN_BLOCK if wide else PLAIN_BLOCK


def _provenance(world: int, gpu: bool, assumed: Sequence[str], preset: str) -> str:
    threads = "" if gpu else f" of {torch.get_num_threads()} threads"
    besides = f"; {', '.join(assumed)} assumed as of {preset}" if assumed else ""
    return (
        f"measured on {socket.gethostname()} with torch {torch.__version__}, {world}"
        f" process{'es' * (world > 1)}{threads} at once{besides}"
    )


def _memory_bytes(kind: str, processes: int) -> float:
    """Bytes of one device: of a GPU, or an equal share of the host's or container's memory."""
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(host_bytes() // processes)


class DeviceMemory(Protocol):
    """The memory functions of `torch.cuda` for the current device."""

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def memory_reserved(self) -> int:
        """Bytes that torch's allocator has reserved."""


def context_bytes(cuda: DeviceMemory) -> int:
    """Bytes of the device's memory that are neither free nor of torch's allocator.

    They are used by the driver and by libraries, and by other programs on the device. Operators and
    collectives must have run before, because libraries allocate on first use.
    """
    free, total = cuda.mem_get_info()
    return max(0, total - free - cuda.memory_reserved())


def workspace_bytes() -> int:
    """Bytes in use in torch's allocator; if no tensor is alive, those of libraries' workspaces."""
    gc.collect()
    return torch.cuda.memory_allocated()


def user_cache() -> Path:
    """The user's folder of cached measurements; it may not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shardwright"


def _cache_name(devices: int, tune_host: bool) -> str:
    """The name of the cache file: host, version of torch, numbers of devices, and tuning."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"{socket.gethostname()}-torch{torch.__version__}-{gpus}gpu-{devices}devices"
    text += "-tuned" if tune_host else "-plain"
    return re.sub(r"[^\w.+-]", "_", text) + ".toml"
